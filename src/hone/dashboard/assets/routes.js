// Addresses: /run/ID/TAB?key=value after #, so that a view can be sent to others.
import { useEffect, useState } from "/assets/vendor/preact-htm.js";
import { query, takeTokenFromAddress } from "/assets/api.js";

export function currentRoute() {
  const [path, parameters] = (location.hash.slice(1) || "/").split("?");
  return {
    parts: path.split("/").filter(Boolean).map(decodeURIComponent),
    asked: Object.fromEntries(new URLSearchParams(parameters || "")),
  };
}

export function go(path, parameters) {
  const text = parameters ? query(parameters) : "";
  location.hash = path + (text ? `?${text}` : "");
}

// Change some parameters of the current address and keep the others.
export function changeParameters(changes) {
  const { parts, asked } = currentRoute();
  go("/" + parts.map(encodeURIComponent).join("/"), { ...asked, ...changes });
}

export const runPath = (id, tab = "overview") => `/run/${encodeURIComponent(id)}/${tab}`;

export function useRoute() {
  const [route, setRoute] = useState(currentRoute());
  useEffect(() => {
    const update = () => {
      takeTokenFromAddress();
      setRoute(currentRoute());
    };
    addEventListener("hashchange", update);
    update();
    return () => removeEventListener("hashchange", update);
  }, []);
  return route;
}
