// The configuration of a run, and its logs.
import { html, useEffect, useRef, useState } from "/assets/vendor/preact-htm.js";
import { api, query, usePolled } from "/assets/api.js";
import { ErrorText } from "/assets/format.js";
import { changeParameters } from "/assets/routes.js";

export function ConfigTab({ run }) {
  const facts = Object.entries(run.about).filter(([, value]) => typeof value !== "object");
  return html`${
    facts.length > 0 &&
    html`<div class="card">
      <dl class="facts small">
        ${facts.map(
          ([name, value]) =>
            html`<dt>${name}</dt>
              <dd>${String(value)}</dd>`,
        )}
      </dl>
    </div>`
  }
  ${Object.entries(run.configs).map(
    ([name, text]) =>
      html`<section class="card">
        <h2>${name}</h2>
        <pre>${text}</pre>
      </section>`,
  )}`;
}

export function LogsTab({ run, asked }) {
  const name = run.logs.includes(asked.log) ? asked.log : run.logs[0];
  const path = `/api/log?${query({ run: run.id, name })}`;
  const { data, error } = usePolled(
    () => (name ? api(path) : Promise.resolve(null)),
    [run.id, name],
    run.status === "running" ? 3 : 0,
  );
  const [text, setText] = useState("");
  const end = useRef(null);
  useEffect(() => {
    if (end.current) end.current.scrollTop = end.current.scrollHeight;
  }, [data, text]);
  if (!name) return html`<p class="soft">There is no log.</p>`;
  const isWanted = (line) => line.toLowerCase().includes(text.toLowerCase());
  const lines = data ? data.text.split("\n").filter(isWanted) : [];
  return html`<div class="row" style=${{ marginBottom: ".6rem" }}>
      ${run.logs.map(
        (one) =>
          html`<button
            aria-pressed=${one === name}
            class=${one === name ? "main" : ""}
            onClick=${() => changeParameters({ log: one })}
          >
            ${one}
          </button>`,
      )}
      <span class="grow"></span>
      <input
        type="search"
        placeholder="lines that contain …"
        aria-label="filter lines"
        value=${text}
        onInput=${(e) => setText(e.target.value)}
      />
    </div>
    <${ErrorText} error=${error} />
    <pre class="card log" ref=${end} tabindex="0">
${data && data.start > 0 && "… (the end of a longer log)\n"}${lines.join("\n")}</pre>`;
}
