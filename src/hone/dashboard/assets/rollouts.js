// Rollouts: a filtered list, and one of them with its messages and tokens.
import { html, useEffect, useState } from "/assets/vendor/preact-htm.js";
import { api, query, usePolled } from "/assets/api.js";
import { ErrorText, formatNumber } from "/assets/format.js";
import { changeParameters, currentRoute, go, runPath } from "/assets/routes.js";
import { TokenView } from "/assets/tokens.js";

const PAGE = 50;
const TYPING_MS = 350;
const FILTERS = [
  "step_from",
  "step_to",
  "reward_from",
  "reward_to",
  "tokens_from",
  "tokens_to",
  "env",
  "stop",
  "unused",
  "text",
  "failed",
  "truncated",
  "group",
  "sort",
  "down",
  "skip",
];

export function Rollouts({ run, asked }) {
  const wanted = Object.fromEntries(
    FILTERS.filter((name) => asked[name] !== undefined).map((name) => [name, asked[name]]),
  );
  const [isReading, setReading] = useState(false);
  const isLive = run.status === "running" || isReading;
  const { data, error } = usePolled(
    () => api(`/api/rollouts?${query({ run: run.id, ...wanted })}`),
    [run.id, JSON.stringify(wanted), isLive],
    isLive ? 3 : 0,
  );
  useEffect(() => {
    if (data) setReading(data.reading);
  }, [data]);
  const chosen = asked.n ? +asked.n : null;
  const kinds = data ? data.kinds : { env: [], stop: [], unused: [], steps: [0, 0, 0] };
  const hasFilters = Object.keys(wanted).length > 0;
  return html`<${Filters} run=${run} asked=${asked} kinds=${kinds} hasFilters=${hasFilters} />
    <${ErrorText} error=${error} />
    <div class="split">
      <${List} run=${run} asked=${asked} data=${data} kinds=${kinds} chosen=${chosen} />
      ${
        chosen
          ? html`<${Rollout} run=${run} n=${chosen} asked=${asked} />`
          : html`<p class="soft">Choose a rollout to read it.</p>`
      }
    </div>`;
}

// Change a filter; the list starts again at its first page.
const filter = (changes) => changeParameters({ ...changes, skip: "" });

function Filters({ run, asked, kinds, hasFilters }) {
  const [typed, type] = useState(asked.text || "");
  useEffect(() => type(asked.text || ""), [asked.text]);
  useEffect(() => {
    const timer = setTimeout(() => {
      if (typed !== (currentRoute().asked.text || "")) filter({ text: typed });
    }, TYPING_MS);
    return () => clearTimeout(timer);
  }, [typed]);
  const number = (name, label) =>
    html`<label
      >${label}<input
        type="number"
        step="any"
        value=${asked[name] || ""}
        onChange=${(e) => filter({ [name]: e.target.value })}
    /></label>`;
  const select = (name, label, values) =>
    values.length > 1 &&
    html`<label
      >${label}<select
        value=${asked[name] || ""}
        onChange=${(e) => filter({ [name]: e.target.value })}
      >
        <option value="">any</option>
        ${values.filter(Boolean).map((value) => html`<option value=${value}>${value}</option>`)}
      </select></label
    >`;
  const flag = (name, label) =>
    html`<label class="inline"
      ><input
        type="checkbox"
        checked=${asked[name] === "1"}
        onChange=${(e) => filter({ [name]: e.target.checked ? "1" : "" })}
      />
      ${label}</label
    >`;
  return html`<div class="filters" role="search">
    <label
      >text<input
        type="search"
        placeholder="prompt, completion, answer"
        value=${typed}
        onInput=${(e) => type(e.target.value)}
    /></label>
    ${run.kind === "rl" && [number("step_from", "step from"), number("step_to", "to")]}
    ${number("reward_from", "reward from")}${number("reward_to", "to")}
    ${number("tokens_from", "tokens from")}${number("tokens_to", "to")}
    ${select("env", "environment", kinds.env)}${select("stop", "stop reason", kinds.stop)}
    ${select("unused", "not trained on because", kinds.unused)}
    ${flag("truncated", "truncated")}${flag("failed", "failed")}
    ${
      hasFilters &&
      html`<button onClick=${() => go(runPath(run.id, "rollouts"))}>Clear filters</button>`
    }
  </div>`;
}

function List({ run, asked, data, kinds, chosen }) {
  const isEvaluation = run.kind === "eval";
  const skip = +(asked.skip || 0);
  const rows = data ? data.rows : [];
  const said = withoutCommonStart(rows.map((row) => row.error || row.said));
  const total = data ? data.total : 0;
  const all = (kinds.steps[2] || 0).toLocaleString("en");
  return html`<div class="card">
    <div class="row small soft">
      <span>${data ? `${total.toLocaleString("en")} of ${all} rollouts` : "…"}</span>
      ${
        data &&
        data.reading &&
        html`<span>reading: ${data.indexed[0]} of ${data.indexed[1]} steps</span>`
      }
    </div>
    <div class="scroll">
      <table class="rollouts">
        <thead>
          <tr>
            ${
              isEvaluation
                ? html`<th class="num">Example</th>`
                : html`<${SortHeader} asked=${asked} name="step" label="Step" />`
            }
            <${SortHeader} asked=${asked} name="reward" label="Reward" />
            ${!isEvaluation && html`<${SortHeader} asked=${asked} name="advantage" label="Adv." />`}
            <${SortHeader} asked=${asked} name="tokens" label="Tokens" />
            <th>Prompt</th>
            <th>Completion</th>
          </tr>
        </thead>
        <tbody>
          ${rows.map(
            (row, i) =>
              html`<tr
                key=${row.id}
                class="click"
                tabindex="0"
                aria-selected=${row.id === chosen}
                onClick=${() => changeParameters({ n: row.id })}
                onKeyDown=${(e) => e.key === "Enter" && changeParameters({ n: row.id })}
              >
                <td class="num">${isEvaluation ? row.example : row.step}</td>
                <td class="num">
                  ${
                    row.error
                      ? html`<span class="status failed" title="failed"></span>`
                      : formatNumber(row.reward)
                  }
                </td>
                ${!isEvaluation && html`<td class="num">${formatNumber(row.advantage)}</td>`}
                <td class="num">${row.tokens}${row.truncated ? " ✂" : ""}</td>
                <td class="text"><div class="line">${row.asked}</div></td>
                <td class="text"><div class="line">${said[i]}</div></td>
              </tr>`,
          )}
        </tbody>
      </table>
    </div>
    ${
      total > PAGE &&
      html`<div class="row" style=${{ marginTop: ".5rem" }}>
        <button
          disabled=${!skip}
          onClick=${() => changeParameters({ skip: Math.max(0, skip - PAGE) })}
        >
          Previous
        </button>
        <span class="small soft">${skip + 1} to ${Math.min(skip + PAGE, total)}</span>
        <button
          disabled=${skip + PAGE >= total}
          onClick=${() => changeParameters({ skip: skip + PAGE })}
        >
          Next
        </button>
      </div>`
    }
    ${data && !total && html`<p class="soft">No rollout matches.</p>`}
  </div>`;
}

// Completions often begin alike (a tag, "Let's think"); the column then shows where they differ.
export function withoutCommonStart(texts) {
  if (texts.length < 2) return texts;
  const shortest = Math.min(...texts.map((text) => text.length));
  let same = 0;
  while (same < shortest && texts.every((text) => text[same] === texts[0][same])) same++;
  return same < 8 ? texts : texts.map((text) => "…" + text.slice(same));
}

function SortHeader({ asked, name, label }) {
  const isSorted = (asked.sort || "step") === name;
  const isAscending = asked.down === "0";
  const sort = () => filter({ sort: name, down: isSorted && !isAscending ? "0" : "1" });
  const direction = isAscending ? "ascending" : "descending";
  return html`<th class="num" aria-sort=${isSorted ? direction : null}>
    <button class="link" onClick=${sort}>
      ${label}${isSorted ? (isAscending ? " ↑" : " ↓") : ""}
    </button>
  </th>`;
}

function Rollout({ run, n, asked }) {
  const path = `/api/rollout?${query({ run: run.id, n })}`;
  const { data, error } = usePolled(() => api(path), [run.id, n], 0);
  if (!data) {
    return html`<div class="card">
      <${ErrorText} error=${error} />${!error && html`<p class="soft">Reading …</p>`}
    </div>`;
  }
  const at = data.at;
  const toggleGroup = () =>
    changeParameters(
      asked.group
        ? { group: "", step_from: "", step_to: "", sort: "reward" }
        : { group: at.grp, step_from: at.step, step_to: at.step, sort: "reward" },
    );
  const title =
    run.kind === "rl"
      ? `Step ${at.step}, group ${at.grp}, rollout ${at.member}`
      : `Example ${at.example}, attempt ${at.member}`;
  return html`<article class="card" aria-label="rollout">
    <div class="row">
      <h2 style=${{ margin: 0 }}>${title}</h2>
      <span class="grow"></span>
      ${
        run.kind === "rl" &&
        html`<button onClick=${toggleGroup}>
          ${asked.group ? "Show all groups" : "Show only its group"}
        </button>`
      }
    </div>
    <${RolloutFacts} data=${data} />
    ${asked.group && html`<${Group} run=${run} at=${at} />`}
    ${[...(data.prompt || []), ...(data.completion || [])].map(
      (message) => html`<${Message} message=${message} />`,
    )}
    <${TokenView} data=${data} asked=${asked} />
  </article>`;
}

function RolloutFacts({ data }) {
  const metrics = Object.entries(data.metrics || {});
  const timings = Object.entries(data.timings || {});
  const timing = timings.map(([name, seconds]) => `${name} ${formatNumber(seconds)}`).join(", ");
  const use = data.unused
    ? html`<span class="chip">not trained on: ${data.unused.replace(/_/g, " ")}</span>`
    : data.is_used && html`<span class="chip good">trained on</span>`;
  return html`<dl class="facts small">
    <dt>reward</dt>
    <dd>
      <b>${formatNumber(data.reward)}</b>
      ${
        metrics.length > 0 &&
        html` =
        ${metrics.map(
          ([name, value]) => html`<span class="chip">${name} ${formatNumber(value)}</span> `,
        )}`
      }
    </dd>
    ${
      data.advantage !== undefined &&
      html`<dt>advantage</dt>
        <dd>${formatNumber(data.advantage)} ${use}</dd>`
    }
    <dt>stop reason</dt>
    <dd>
      ${data.stop || "–"}${data.is_truncated ? html` <span class="chip bad">truncated</span>` : ""}
    </dd>
    ${
      data.error &&
      html`<dt>error</dt>
        <dd class="error">${data.error}</dd>`
    }
    ${
      data.answer &&
      html`<dt>right answer</dt>
        <dd class="mono">${String(data.answer)}</dd>`
    }
    <dt>duration</dt>
    <dd>${formatNumber(data.seconds)} s${timing && ` (${timing})`}</dd>
  </dl>`;
}

const ROLES = ["system", "user", "assistant", "tool"];

function Message({ message }) {
  const role = ROLES.includes(message.role) ? message.role : "user";
  const agent = message.agent ? ` (${message.agent})` : "";
  return html`<div class=${`message ${role}`}>
    <div class="role">${message.role}${agent}</div>
    <pre>${contentText(message.content)}</pre>
    ${(message.tool_calls || []).map(
      (call) => html`<pre class="soft">calls ${JSON.stringify(call.function || call)}</pre>`,
    )}
  </div>`;
}

function contentText(content) {
  if (Array.isArray(content)) {
    return content
      .map((part) => part.text ?? (typeof part === "string" ? part : `[${part.type}]`))
      .join(" ");
  }
  if (typeof content === "string") return content;
  return content ? JSON.stringify(content, null, 1) : "";
}

function Group({ run, at }) {
  const parameters = {
    run: run.id,
    group: at.grp,
    step_from: at.step,
    step_to: at.step,
    sort: "reward",
    down: "1",
  };
  const path = `/api/rollouts?${query(parameters)}`;
  const { data } = usePolled(() => api(path), [run.id, at.grp, at.step], 0);
  return (
    data &&
    html`<div class="group" role="list" aria-label="rollouts of the group">
      ${data.rows.map(
        (row) =>
          html`<div
            role="listitem"
            class="message assistant"
            style=${{ outline: row.id === at.id ? "2px solid var(--accent)" : "none" }}
          >
            <div class="row small">
              <b>${formatNumber(row.reward)}</b>
              <span class="soft"
                >advantage ${formatNumber(row.advantage)}, ${row.tokens} tokens</span
              >
            </div>
            <pre>${row.said}</pre>
            <button class="link" onClick=${() => changeParameters({ n: row.id })}>read</button>
          </div>`,
      )}
    </div>`
  );
}
