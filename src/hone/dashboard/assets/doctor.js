// The findings of a run.
import { html } from "/assets/vendor/preact-htm.js";
import { api, query, usePolled } from "/assets/api.js";
import { ErrorText } from "/assets/format.js";
import { runPath } from "/assets/routes.js";

export function DoctorTab({ run }) {
  const { data, error } = usePolled(
    () => api(`/api/doctor?${query({ run: run.id })}`),
    [run.id, Math.floor(4 * Math.log2(run.step + 1))],
    0,
  );
  if (!data) {
    return html`<${ErrorText} error=${error} />${!error && html`<p class="soft">Examining …</p>`}`;
  }
  if (!data.findings.length) {
    const checked =
      "collapse, length, variance, staleness, truncation, prompt format, entropy, failures";
    return html`<div class="card finding none">
      <h2>${data.note ? "Too early to say" : "No known problems found"}</h2>
      <p>${data.note || `${data.steps} steps were checked for: ${checked}.`}</p>
    </div>`;
  }
  return data.findings.map(
    (finding) =>
      html`<section class=${`card finding ${finding.is_problem ? "" : "none"}`}>
        <h2>${finding.title}</h2>
        <p>Since step <b>${finding.first_step}</b>. ${finding.evidence}</p>
        <b>${finding.is_problem ? "What usually helps" : "What to do next"}</b>
        <ul>
          ${finding.helps.map((text) => html`<li>${text}</li>`)}
        </ul>
        ${finding.rollouts.length > 0 && html`<${Examples} run=${run} finding=${finding} />`}
      </section>`,
  );
}

function Examples({ run, finding }) {
  const step = finding.first_step;
  const address = (n) =>
    `#${runPath(run.id, "rollouts")}?${query({ n, step_from: step, step_to: step })}`;
  return html`<p>
    Rollouts that show it:
    ${finding.rollouts.map((n, i) => html`${" "}<a href=${address(n)}>${i + 1}</a>`)}
  </p>`;
}
