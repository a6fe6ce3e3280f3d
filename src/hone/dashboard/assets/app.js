// The page: navigation, theme, and the component of the current address.
// Text of models is only ever set as text, never as HTML.
import { html, render, useEffect, useState } from "/assets/vendor/preact-htm.js";
import { takeTokenFromAddress } from "/assets/api.js";
import { ComparePage } from "/assets/compare.js";
import { LabPage } from "/assets/lab.js";
import { useRoute } from "/assets/routes.js";
import { RunList } from "/assets/run_list.js";
import { RunPage } from "/assets/run_page.js";

const THEMES = { auto: "◐", light: "☀", dark: "☾" };
const THEME_KEY = "hone-theme";
const PAGES = ["runs", "run", "compare", "lab"];

function useTheme() {
  const [theme, setTheme] = useState(() => {
    try {
      return localStorage.getItem(THEME_KEY) || "auto";
    } catch {
      return "auto"; // a private window
    }
  });
  useEffect(() => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    try {
      localStorage.setItem(THEME_KEY, theme);
    } catch {
      // a private window
    }
  }, [theme]);
  const names = Object.keys(THEMES);
  return [theme, () => setTheme(names[(names.indexOf(theme) + 1) % names.length])];
}

function App() {
  const { parts, asked } = useRoute();
  const [theme, nextTheme] = useTheme();
  const page = PAGES.includes(parts[0]) ? parts[0] : "runs";
  useEffect(() => {
    document.title = page === "run" ? `${parts[1]} · Hone` : "Hone";
  }, [parts.join("/")]);
  const link = (name, path, label) =>
    html`<a href=${path} aria-current=${page === name ? "page" : null}>${label}</a>`;
  return html`<header class="top">
      <a class="brand" href="#/">Hone</a>
      <nav aria-label="main">
        ${link("runs", "#/", "Runs")}${link("compare", "#/compare", "Compare")}
        ${link("lab", "#/lab", "Lab")}
      </nav>
      <button onClick=${nextTheme} aria-label=${`theme: ${theme}`}>
        ${THEMES[theme]} ${theme}
      </button>
    </header>
    <main>
      ${
        page === "run" &&
        html`<${RunPage}
          key=${parts[1]}
          id=${parts[1]}
          tab=${parts[2]}
          asked=${asked}
          theme=${theme}
        />`
      }
      ${page === "compare" && html`<${ComparePage} asked=${asked} theme=${theme} />`}
      ${page === "lab" && html`<${LabPage} asked=${asked} />`}
      ${page === "runs" && html`<${RunList} asked=${asked} />`}
    </main>`;
}

takeTokenFromAddress();
const place = document.getElementById("app");
place.textContent = "";
render(html`<${App} />`, place);
