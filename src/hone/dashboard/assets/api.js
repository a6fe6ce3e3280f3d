// Requests to the dashboard's server, and hooks that repeat them.
import { useCallback, useEffect, useRef, useState } from "/assets/vendor/preact-htm.js";

const TOKEN_KEY = "hone-token";

// The printed address carries the token after #; it moves into the browser's storage.
export function takeTokenFromAddress() {
  if (!location.hash.startsWith("#token=")) return;
  try {
    localStorage.setItem(TOKEN_KEY, decodeURIComponent(location.hash.slice(7)));
  } catch {
    // a private window: the page reads, and starts nothing
  }
  history.replaceState(null, "", "#/");
}

export function token() {
  try {
    return localStorage.getItem(TOKEN_KEY) || "";
  } catch {
    return "";
  }
}

const authorization = () => (token() ? { authorization: `Bearer ${token()}` } : {});

// GET, or POST if there is a body. Throws an Error with the server's message.
export async function api(path, body) {
  const options = { headers: authorization() };
  if (body !== undefined) {
    options.method = "POST";
    options.headers["content-type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new Error("The dashboard does not answer. Is it still running?");
  }
  const found = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(found.error || `HTTP ${response.status}`);
  return found;
}

export function query(values) {
  const isGiven = (value) =>
    value !== "" && value !== undefined && value !== null && value !== false;
  return new URLSearchParams(
    Object.entries(values).filter(([, value]) => isGiven(value)),
  ).toString();
}

export async function savePlot(run, format, name) {
  const response = await fetch(`/api/plot?${query({ run, format })}`, { headers: authorization() });
  if (!response.ok) return alert((await response.json()).error);
  const href = URL.createObjectURL(await response.blob());
  Object.assign(document.createElement("a"), { href, download: `${name}.${format}` }).click();
  setTimeout(() => URL.revokeObjectURL(href), 10000);
}

// Call `load` now and then every `seconds` while the page is visible; 0 calls it once.
export function usePolled(load, keys, seconds) {
  const [state, setState] = useState({ data: null, error: null });
  useEffect(() => {
    let isActive = true;
    let timer = 0;
    const refresh = async () => {
      if (!document.hidden) {
        try {
          const data = await load();
          if (isActive) setState({ data, error: null });
        } catch (error) {
          if (isActive) setState((old) => ({ ...old, error }));
        }
      }
      if (isActive && seconds) timer = setTimeout(refresh, 1000 * seconds);
    };
    setState({ data: null, error: null });
    refresh();
    return () => {
      isActive = false;
      clearTimeout(timer);
    };
  }, keys);
  return state;
}

// Series {name: [steps, values]} of a run. Only new steps are requested; `restart` requests all
// again, for a run that was resumed from an earlier step.
export function useSeries(id, names, isLive) {
  const [series, setSeries] = useState({});
  const last = useRef(-1);
  const wanted = names.join(",");
  useEffect(() => {
    setSeries({});
    last.current = -1;
  }, [id, wanted]);
  useEffect(() => {
    if (!wanted) return;
    let isActive = true;
    let timer = 0;
    const refresh = async () => {
      if (!document.hidden) {
        try {
          const parameters = query({ run: id, names: wanted, since: last.current });
          const found = await api(`/api/series?${parameters}`);
          if (!isActive) return;
          const isFirst = last.current < 0;
          for (const [steps] of Object.values(found)) {
            last.current = Math.max(last.current, steps.at(-1) ?? -1);
          }
          if (isFirst) setSeries(found);
          else if (Object.values(found).some(([steps]) => steps.length)) {
            setSeries((old) => joinSeries(old, found));
          }
        } catch {
          // the request for the run itself shows the error
        }
      }
      if (isActive && isLive) timer = setTimeout(refresh, 2000);
    };
    refresh();
    return () => {
      isActive = false;
      clearTimeout(timer);
    };
  }, [id, wanted, isLive]);
  const restart = useCallback(() => {
    last.current = -1;
    setSeries({});
  }, []);
  return [series, last, restart];
}

function joinSeries(old, added) {
  const joined = { ...old };
  for (const [name, [steps, values]] of Object.entries(added)) {
    const [oldSteps, oldValues] = old[name] || [[], []];
    joined[name] = [
      [...oldSteps, ...steps],
      [...oldValues, ...values],
    ];
  }
  return joined;
}
