// Ask a run's weights and the model before training the same question.
import { html, useState } from "/assets/vendor/preact-htm.js";
import { api, query, token, usePolled } from "/assets/api.js";
import { ErrorText, formatNumber } from "/assets/format.js";

export function PlaygroundTab({ run }) {
  const { data, error } = usePolled(() => api("/api/playground"), [], 2);
  const [failure, setFailure] = useState(null);
  const weights = run.checkpoints.filter((one) => one.kind === "weights");
  const [chosen, choose] = useState(weights.length ? weights.at(-1).name : "");
  if (!weights.length) return html`<p class="soft">The run has no weights yet.</p>`;
  if (!token()) {
    return html`<p class="soft">
      To load models, open the address with the token that the dashboard printed.
    </p>`;
  }
  const models = data ? data.models : [];
  const start = () =>
    api("/api/playground/start", { run: run.id, name: chosen }).then(
      () => setFailure(null),
      setFailure,
    );
  const stop = () => api("/api/playground/stop", {}).then(() => setFailure(null), setFailure);
  return html`<div class="row filters">
      <label
        >weights<select
          aria-label="weights"
          value=${chosen}
          onChange=${(e) => choose(e.target.value)}
        >
          ${weights.map((one) => html`<option value=${one.name}>step ${one.step}</option>`)}
        </select></label
      >
      <button class=${models.length ? "" : "main"} onClick=${start}>
        Load them, and the model before training
      </button>
      ${models.length > 0 && html`<button onClick=${stop}>Unload</button>`}
      ${models.map(
        (model) =>
          html`<span class="chip ${model.state === "ready" ? "good" : ""}"
            >${model.title}: ${model.state}</span
          >`,
      )}
    </div>
    <${ErrorText} error=${failure || error} />
    ${models
      .filter((model) => model.error)
      .map((model) => html`<p class="error">${model.title}: ${model.error}</p>`)}
    ${models.length > 0 && html`<${Questions} run=${run} models=${models} />`}`;
}

function Questions({ run, models }) {
  const path = `/api/rollouts?${query({ run: run.id, most: 1, sort: "step" })}`;
  const { data: first } = usePolled(
    () => (run.kind === "rl" ? api(path) : Promise.resolve(null)),
    [run.id],
    0,
  );
  const row = first && first.rows[0];
  const { data: example } = usePolled(
    () => (row ? api(`/api/rollout?${query({ run: run.id, n: row.id })}`) : Promise.resolve(null)),
    [row && row.id],
    0,
  );
  const prompt = (example && example.prompt) || [];
  const system = prompt.find((message) => message.role === "system");
  const [text, setText] = useState("");
  const [systemText, setSystemText] = useState(null);
  const [temperature, setTemperature] = useState(1);
  const [maxTokens, setMaxTokens] = useState(128);
  const [answers, setAnswers] = useState([]);
  const systemShown = systemText ?? (system ? String(system.content) : "");
  const user = prompt.findLast((message) => message.role === "user");
  const ask = (event) => {
    event.preventDefault();
    const content = text || (user ? String(user.content) : "");
    const messages = [{ role: "user", content }];
    if (systemShown) messages.unshift({ role: "system", content: systemShown });
    const seed = Math.floor(1e9 * Math.random());
    const body = { messages, temperature, max_tokens: maxTokens, seed };
    const entry = { content, answers: models.map(() => null) };
    const replace = (i, answer) => {
      entry.answers[i] = answer;
      setAnswers((old) => old.map((one) => (one === entry ? entry : one)));
    };
    setAnswers((old) => [entry, ...old]);
    models.forEach((_, i) =>
      api("/api/playground/ask", { model: i, ...body }).then(
        (answer) => replace(i, answer),
        (error) => replace(i, { text: error.message, isError: true }),
      ),
    );
  };
  const isReady = models.every((model) => model.state === "ready");
  return html`<form class="card" onSubmit=${ask}>
      <label class="small soft"
        >system prompt<textarea
          rows="2"
          aria-label="system prompt"
          value=${systemShown}
          onInput=${(e) => setSystemText(e.target.value)}
        ></textarea>
      </label>
      <label class="small soft"
        >question<textarea
          rows="2"
          aria-label="question"
          placeholder=${user ? String(user.content) : ""}
          value=${text}
          onInput=${(e) => setText(e.target.value)}
        ></textarea>
      </label>
      <div class="filters row">
        <label
          >temperature<input
            type="number"
            min="0"
            max="2"
            step="0.1"
            value=${temperature}
            onInput=${(e) => setTemperature(+e.target.value)}
        /></label>
        <label
          >max tokens<input
            type="number"
            min="1"
            max="4096"
            value=${maxTokens}
            onInput=${(e) => setMaxTokens(+e.target.value)}
        /></label>
        <button class="main" disabled=${!isReady}>${isReady ? "Ask both" : "Loading …"}</button>
      </div>
    </form>
    ${answers.map(
      (entry) =>
        html`<section class="card">
          <div class="message user"><pre>${entry.content}</pre></div>
          <div class="pair">
            ${models.map(
              (model, i) => html`<${Answer} title=${model.title} answer=${entry.answers[i]} />`,
            )}
          </div>
        </section>`,
    )}`;
}

function Answer({ title, answer }) {
  const facts =
    answer && !answer.isError
      ? `${answer.tokens} tokens, ${answer.finish_reason}, ${formatNumber(answer.seconds)} s`
      : "";
  return html`<div class="message assistant">
    <div class="role">${title}</div>
    <pre class=${answer && answer.isError ? "error" : ""}>${answer ? answer.text : "…"}</pre>
    <div class="small soft">${facts}</div>
  </div>`;
}
