// Weights and checkpoints of a run.
import { html, useState } from "/assets/vendor/preact-htm.js";
import { api, token } from "/assets/api.js";
import { ErrorText, formatBytes } from "/assets/format.js";
import { go, runPath } from "/assets/routes.js";

const EXAMPLES = 50; // of an evaluation
const TITLES = { weights: "Hugging Face weights", checkpoint: "Checkpoint to resume from" };

export function Checkpoints({ run }) {
  const [error, setError] = useState(null);
  const [started, setStarted] = useState(null);
  const download = (name) =>
    api("/api/ticket", { run: run.id, name }).then((found) => {
      location.href = found.url;
      setError(null);
    }, setError);
  const evaluate = (name) =>
    api("/api/evaluate", { run: run.id, name, examples: EXAMPLES }).then((job) => {
      setStarted(job);
      setError(null);
    }, setError);
  const tryOut = (name) =>
    api("/api/playground/start", { run: run.id, name }).then(
      () => go(runPath(run.id, "playground")),
      setError,
    );
  if (!run.checkpoints.length) {
    return html`<p class="soft">
      No weights and no checkpoint yet. Weights are written every weights.interval steps and at the
      end, checkpoints every ckpt.interval steps.
    </p>`;
  }
  const job = started && (run.jobs.find((one) => one.name === started.name) || started);
  const buttons = (one) => html`
    <button disabled=${!token()} onClick=${() => download(one.name)}>Download</button>
    ${
      one.kind === "weights" &&
      run.kind === "rl" &&
      html`<button
        disabled=${!token()}
        onClick=${() => evaluate(one.name)}
        title=${`${EXAMPLES} examples of the run's environment, as a job`}
      >
        Evaluate
      </button>`
    }
    ${
      one.kind === "weights" &&
      html`<button disabled=${!token()} onClick=${() => tryOut(one.name)}>Try it</button>`
    }
    ${one.kind === "checkpoint" && run.kind === "rl" && html`<code class="small">${forkCommand(run, one.step)}</code>`}
  `;
  return html`<${ErrorText} error=${error} />
    ${
      job &&
      html`<p>
        ${job.name}: <span class="status ${job.state}">${job.state}</span>. Its rollouts are among
        the ${" "}<a href="#/?kind=eval">evaluations</a>, its output is on the page
        <a href="#/lab"> Lab</a>.
      </p>`
    }
    <div class="scroll">
      <table>
        <thead>
          <tr>
            <th>What</th>
            <th class="num">Step</th>
            <th class="num">Size</th>
            <th></th>
            <th>Directory</th>
          </tr>
        </thead>
        <tbody>
          ${run.checkpoints.map(
            (one) =>
              html`<tr>
                <td>${TITLES[one.kind]}</td>
                <td class="num">${one.step}</td>
                <td class="num">${formatBytes(one.bytes)}</td>
                <td><div class="row">${buttons(one)}</div></td>
                <td class="mono">${run.place}/${one.name}</td>
              </tr>`,
          )}
        </tbody>
      </table>
    </div>`;
}

const forkCommand = (run, step) =>
  `rl @ ${run.typed}/configs/rl.toml --fork ${run.typed}@${step} --output-dir ${run.typed}-fork --max-steps N`;
