// The page: routes in the address after #, data from /api. Text of models is only ever set as text.
import { html, render, useState, useEffect, useRef, useMemo, useCallback } from "/assets/vendor/preact-htm.js";

// ---------------------------------------------------------------- what the server is asked
const KEY = "hone-token";
if (location.hash.startsWith("#token=")) {
  try { localStorage.setItem(KEY, decodeURIComponent(location.hash.slice(7))); } catch { /* private window */ }
  history.replaceState(null, "", "#/");
}
const token = () => { try { return localStorage.getItem(KEY) || ""; } catch { return ""; } };

async function api(path, body) {
  const headers = token() ? { authorization: `Bearer ${token()}` } : {};
  const asked = body === undefined ? { headers } : { method: "POST", headers: { ...headers, "content-type": "application/json" }, body: JSON.stringify(body) };
  let answer;
  try { answer = await fetch(path, asked); } catch { throw new Error("the dashboard does not answer: was it ended?"); }
  const found = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(found.error || `HTTP ${answer.status}`);
  return found;
}
const query = values => new URLSearchParams(Object.entries(values).filter(([, v]) => v !== "" && v !== undefined && v !== null && v !== false)).toString();

async function savePlot(run, format, name) {
  const headers = token() ? { authorization: `Bearer ${token()}` } : {};
  const answer = await fetch(`/api/plot?${query({ run, format })}`, { headers });
  if (!answer.ok) return alert((await answer.json()).error);
  const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(await answer.blob()), download: `${name}.${format}` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// Asks at once and then every so many seconds, while the page is looked at.
function usePolled(ask, keys, seconds) {
  const [state, set] = useState({ data: null, error: null });
  useEffect(() => {
    let on = true, timer = 0;
    const look = async () => {
      if (!document.hidden) {
        try { const data = await ask(); if (on) set({ data, error: null }); }
        catch (error) { if (on) set(old => ({ ...old, error })); }
      }
      if (on && seconds) timer = setTimeout(look, 1000 * seconds);
    };
    set(old => ({ data: null, error: null })); look();
    return () => { on = false; clearTimeout(timer); };
  }, keys);
  return state;
}

// ---------------------------------------------------------------- addresses
function parse() {
  const [path, asked] = (location.hash.slice(1) || "/").split("?");
  return { parts: path.split("/").filter(Boolean).map(decodeURIComponent), asked: Object.fromEntries(new URLSearchParams(asked || "")) };
}
const go = (path, asked) => { const q = asked ? query(asked) : ""; location.hash = path + (q ? `?${q}` : ""); };
const runPath = (id, tab = "overview") => `/run/${encodeURIComponent(id)}/${tab}`;
function useRoute() {
  const [route, set] = useState(parse());
  useEffect(() => { const on = () => set(parse()); addEventListener("hashchange", on); on(); return () => removeEventListener("hashchange", on); }, []);
  return route;
}

// ---------------------------------------------------------------- words and numbers
const short = x => x === null || x === undefined || Number.isNaN(x) ? "–" : x === 0 ? "0" : Math.abs(x) >= 1e5 || Math.abs(x) < 1e-3 ? x.toExponential(2) : Math.abs(x) >= 100 ? x.toFixed(0) : +x.toPrecision(4) + "";
const brief = x => x === 0 ? "0" : Math.abs(x) >= 1e4 || Math.abs(x) < 1e-3 ? x.toExponential(1).replace(".0", "").replace("+", "") : +x.toPrecision(3) + "";
const ago = s => s < 90 ? `${Math.round(s)} s` : s < 5400 ? `${Math.round(s / 60)} min` : s < 172800 ? `${Math.round(s / 3600)} h` : `${Math.round(s / 86400)} days`;
const size = b => b > 1e9 ? `${(b / 1e9).toFixed(2)} GB` : b > 1e6 ? `${(b / 1e6).toFixed(1)} MB` : `${(b / 1e3).toFixed(0)} kB`;
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const COLOURS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6"];

function Problem({ error }) { return error && html`<p class="error" role="alert">${error.message}</p>`; }

function Spark({ values, width = 120, height = 28 }) {
  const known = values.filter(v => v !== null);
  if (known.length < 2) return html`<span class="soft">${known.length ? short(known[0]) : "–"}</span>`;
  const low = Math.min(...known), span = Math.max(...known) - low || 1;
  const d = known.map((v, i) => `${i ? "L" : "M"}${(i * width / (known.length - 1)).toFixed(1)} ${(height - 3 - (v - low) / span * (height - 6)).toFixed(1)}`).join("");
  return html`<svg class="spark" width=${width} height=${height} role="img" aria-label=${`from ${short(known[0])} to ${short(known.at(-1))}`}><path d=${d} /></svg>`;
}

// ---------------------------------------------------------------- charts
const sync = window.uPlot && uPlot.sync("steps");
function Chart({ title, lines, log, percent, theme, note, mark }) {
  const place = useRef(null), plot = useRef(null);
  const [at, setAt] = useState(null);
  const drawn = lines.filter(line => line.data && line.data[0].length);
  const table = useMemo(() => {
    const steps = [...new Set(drawn.flatMap(line => line.data[0]))].sort((a, b) => a - b);
    const where = new Map(steps.map((s, i) => [s, i]));
    return [steps, ...drawn.map(line => { const column = Array(steps.length).fill(null); line.data[0].forEach((s, i) => { const v = line.data[1][i]; column[where.get(s)] = log && !(v > 0) ? null : v; }); return column; })];
  }, [lines]);
  const shape = JSON.stringify([title, log, percent, theme, mark, drawn.map(line => [line.label, line.colour, line.of])]);
  useEffect(() => {
    if (!place.current || !drawn.length) return;
    const axis = { stroke: css("--soft"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line") }, font: "11px system-ui" };
    const value = v => percent ? `${Math.round(100 * v)} %` : brief(v);
    const low = drawn.findIndex(line => line.of === "low"), high = drawn.findIndex(line => line.of === "high");
    const options = {
      width: place.current.clientWidth || 320, height: 190, cursor: { sync: { key: "steps" }, points: { size: 6 }, drag: { x: true, y: false } }, legend: { show: false },
      scales: { x: { time: false }, y: log ? { distr: 3 } : { range: (_, low, high) => low === null ? [0, 1] : high - low < 1e-12 ? [low - (Math.abs(low) / 2 || 0), high + (Math.abs(high) / 2 || 1)] : uPlot.rangeNum(low, high, .1, true) } },
      axes: [{ ...axis, size: 28 }, { ...axis, size: 56, values: (_, ticks) => ticks.map(v => v === null ? "" : value(v)) }],
      series: [{}, ...drawn.map((line, i) => ({ label: line.label, stroke: line.of ? "transparent" : css(line.colour || COLOURS[i % 6]), width: line.of ? 0 : 1.7, points: { show: u => u.data[0].length < 30 && !line.of }, spanGaps: true }))],
      bands: low >= 0 && high >= 0 ? [{ series: [high + 1, low + 1], fill: css("--c1") + "2e" }] : [],
      hooks: {
        setCursor: [u => setAt(u.cursor.idx)],
        draw: [u => {  // where the run was forked from
          if (mark === undefined || mark === null) return;
          const x = Math.round(u.valToPos(mark, "x", true)), { top, height, left, width } = u.bbox;
          if (x < left || x > left + width) return;
          u.ctx.save(); u.ctx.strokeStyle = css("--soft"); u.ctx.setLineDash([6, 5]); u.ctx.beginPath(); u.ctx.moveTo(x, top); u.ctx.lineTo(x, top + height); u.ctx.stroke(); u.ctx.restore();
        }],
      },
    };
    plot.current = new uPlot(options, table, place.current);
    const watch = new ResizeObserver(() => plot.current && place.current && plot.current.setSize({ width: place.current.clientWidth, height: 190 }));
    watch.observe(place.current);
    return () => { watch.disconnect(); plot.current.destroy(); plot.current = null; };
  }, [shape]);
  useEffect(() => { if (plot.current) plot.current.setData(table); }, [table]);
  const shown = drawn.map((line, i) => [line, i]).filter(([line]) => !line.of);
  const index = at ?? (table[0].length - 1), valueOf = i => at === null ? table[i + 1].findLast(v => v !== null) : table[i + 1][index];
  const told = v => percent && v !== null && v !== undefined ? `${(100 * v).toFixed(1)} %` : short(v);
  if (!drawn.length) return null;
  return html`<section class="card chart" aria-label=${title}>
    <h2>${title}${shown.length === 1 && html`<span class="now">${told(valueOf(shown[0][1]))}</span>`}</h2>
    <div ref=${place}></div>
    <div class="legend"><span>step ${table[0][index]}</span>${shown.length > 1 && shown.map(([line, i]) => html`<span><i style=${{ background: `var(${line.colour || COLOURS[i % 6]})` }}></i>${line.label} <b>${told(valueOf(i))}</b></span>`)}${note && html`<span>${note}</span>`}</div>
  </section>`;
}

const RL = [
  { title: "Reward", lines: [["reward/mean", "mean"], ["reward/low", "spread", "low"], ["reward/high", "spread", "high"]] },
  { title: "Loss", lines: [["loss/mean", "loss"]] },
  { title: "Entropy", lines: [["entropy/mean", "nats a token"]] },
  { title: "Mismatch KL", lines: [["mismatch_kl/mean", "KL"]], log: true },
  { title: "Staleness", lines: [["batch/off_policy_level/mean", "mean"], ["batch/off_policy_level/max", "most"]] },
  { title: "Tokens of a completion", lines: [["completion_len/mean", "mean"], ["completion_len/max", "longest"]] },
  { title: "Groups with something to learn from", lines: [["signal", "with signal"], ["batch/solve_all", "solved by all"], ["batch/solve_none", "solved by none"]], percent: true },
  { title: "Cut off, and left out of the loss", lines: [["is_truncated/mean", "cut off"], ["is_masked/mean", "left out"]], percent: true },
  { title: "Tokens a second", lines: [["perf/generate_throughput", "sampled"], ["perf/train_throughput", "trained"]] },
  { title: "Memory, GiB", lines: [["perf/peak_memory", "most of the trainer"]] },
  { title: "Norm of the gradient", lines: [["optim/grad_norm", "norm"]] },
  { title: "Learning rate", lines: [["optim/lr", "rate"]] },
];
const SFT = [
  { title: "Loss", lines: [["loss/mean", "training"], ["val/loss", "held out"]] },
  { title: "Pairs with the chosen answer ahead", lines: [["rewards/accuracies", "training"], ["val/rewards/accuracies", "held out"]], percent: true },
  { title: "Margin of the chosen answer", lines: [["rewards/margins", "training"], ["val/rewards/margins", "held out"]] },
  { title: "Rewards of the answers", lines: [["rewards/chosen", "chosen"], ["rewards/rejected", "rejected"]] },
  { title: "Learning rate", lines: [["optim/lr", "rate"]] },
  { title: "Norm of the gradient", lines: [["optim/grad_norm", "norm"]] },
  { title: "Tokens a second", lines: [["perf/throughput", "trained"]] },
  { title: "Memory, GiB", lines: [["perf/peak_memory", "most"]] },
];
const TIMES = ["time/step", "time/generate", "time/wait_for_weights", "time/wait_for_batch", "time/train", "time/publish_weights", "time/update_weights", "time/save", "time/rollout/model", "time/rollout/environment", "time/rollout/scoring"];

// All series of a run, kept up with: only what is new is asked for, all again where the run has gone back.
function useSeries(id, names, live) {
  const [series, set] = useState({}), last = useRef(-1), wanted = names.join(",");
  useEffect(() => { set({}); last.current = -1; }, [id, wanted]);
  useEffect(() => {
    if (!wanted) return;
    let on = true, timer = 0;
    const look = async () => {
      if (!document.hidden) try {
        const found = await api(`/api/series?${query({ run: id, names: wanted, since: last.current })}`);
        if (!on) return;
        const before = last.current;
        for (const [steps] of Object.values(found)) last.current = Math.max(last.current, steps.at(-1) ?? -1);
        if (before < 0) set(found);
        else if (Object.keys(found).some(name => found[name][0].length)) set(old => {
          const joined = { ...old };
          for (const [name, [steps, values]] of Object.entries(found)) joined[name] = old[name] ? [[...old[name][0], ...steps], [...old[name][1], ...values]] : [steps, values];
          return joined;
        });
      } catch { /* told by the run's own look */ }
      if (on && live) timer = setTimeout(look, 2000);
    };
    look();
    return () => { on = false; clearTimeout(timer); };
  }, [id, wanted, live]);
  const again = useCallback(() => { last.current = -1; set({}); }, []);
  return [series, last, again];
}

// ---------------------------------------------------------------- the list of runs
function RunList() {
  const { data, error } = usePolled(() => api("/api/runs"), [], 3);
  const [text, setText] = useState(""), [chosen, choose] = useState([]);
  if (!data) return html`<${Problem} error=${error} />${!error && html`<p class="soft">Looking for runs …</p>`}`;
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const found = data.runs.filter(run => words.every(word => `${run.id} ${run.status} ${run.model} ${run.env} ${run.device}`.toLowerCase().includes(word)));
  const toggle = id => choose(old => old.includes(id) ? old.filter(x => x !== id) : [...old, id]);
  return html`<div class="row">
      <h1>Runs</h1><span class="soft small mono">${data.root}</span><span class="grow"></span>
      <input type="search" placeholder="place, model, environment, status" aria-label="search runs" size="34" value=${text} onInput=${e => setText(e.target.value)} />
      <button class="main" disabled=${chosen.length < 2} onClick=${() => go("/compare", { runs: chosen.join("|") })}>Compare ${chosen.length || ""}</button>
    </div><${Problem} error=${error} />
    ${!data.runs.length && html`<div class="card" style=${{ marginTop: "1rem" }}><h2>No run is here yet</h2><p>Start one in the <a href="#/lab">lab</a>, or in a terminal, and it appears here by itself: <code>make demo</code>, or <code>rl @ FILE --output-dir DIR</code> with DIR below ${data.root}.</p></div>`}
    <div class="scroll"><table class="cards" style=${{ marginTop: ".8rem" }}>
      <thead><tr><th></th><th>Run</th><th>Status</th><th>Curve</th><th class="num">First → last</th><th class="num">Step</th><th>Model, environment</th><th>Device</th><th class="num">Last sign</th></tr></thead>
      <tbody>${found.map(run => html`<tr key=${run.id}>
        <td>${run.kind !== "eval" && html`<input type="checkbox" aria-label=${`choose ${run.id}`} checked=${chosen.includes(run.id)} onChange=${() => toggle(run.id)} />`}</td>
        <td><a href=${"#" + runPath(run.id, run.kind === "eval" ? "rollouts" : "overview")}><b>${run.place === "." ? run.name : run.place}</b></a> <span class="chip">${run.kind}</span>${run.fork && html` <span class="chip">fork of ${run.fork.run}@${run.fork.step}</span>`}</td>
        <td><span class="status ${run.status}">${run.status}</span></td>
        <td class="wide"><${Spark} values=${run.spark} /></td>
        <td class="num wide">${run.spark.length > 1 ? `${short(run.spark[0])} → ${short(run.spark.at(-1))}` : run.spark.length ? short(run.spark[0]) : "–"} <span class="soft small">${run.metric.split("/")[0]}</span></td>
        <td class="num hide">${run.kind === "eval" ? "" : run.step}${run.max_steps ? ` / ${run.max_steps}` : ""}</td>
        <td class="hide"><span class="small">${run.model.split("/").slice(-2).join("/")}<br /><span class="soft">${run.env}</span></span></td>
        <td class="hide small">${run.device || "–"}</td><td class="num small wide">${ago(run.age)}</td></tr>`)}
      </tbody></table></div>
    ${data.runs.length > 0 && !found.length && html`<p class="soft">No run fits “${text}”.</p>`}`;
}

// ---------------------------------------------------------------- a run
const TABS = { rl: ["overview", "timeline", "rollouts", "checkpoints", "doctor", "config", "logs"], sft: ["overview", "checkpoints", "doctor", "config", "logs"], eval: ["rollouts", "config"] };
function RunPage({ id, tab, asked, theme }) {
  const { data: run, error } = usePolled(() => api(`/api/run?${query({ run: id })}`), [id], 2);
  const isAbsent = error && error.message.startsWith("not there");
  if (!run) return isAbsent ? html`<h1>${id.replace(/:\w+$/, "")}</h1><p class="soft">No such run is here. One that was just started appears when it has loaded its model; what it says meanwhile is in the <a href="#/lab">lab</a>.</p>`
    : html`<${Problem} error=${error} />${!error && html`<p class="soft">Reading the run …</p>`}`;
  const tabs = TABS[run.kind], shown = tabs.includes(tab) ? tab : tabs[0];
  const job = run.jobs.find(one => one.command !== "vf-eval");
  return html`<div class="row"><h1>${run.place === "." ? run.name : run.place}</h1><span class="chip">${run.kind}</span><span class="status ${run.status}">${run.status}</span>
      ${run.kind === "eval" && html`<span>reward <b>${short(run.about.reward)}</b> ± ${short(1.96 * run.about.reward_error)} (95 %), ${run.about.rollouts} rollouts, ${run.about.failed} failed</span>`}
      <span class="soft" hidden=${run.kind === "eval"}>step ${run.step}${run.max_steps ? ` of ${run.max_steps}` : ""}</span>
      ${run.max_steps && html`<div class="meter" role="progressbar" aria-label="progress" aria-valuenow=${run.step} aria-valuemax=${run.max_steps}><i style=${{ width: `${Math.min(100, 100 * run.step / run.max_steps)}%` }}></i></div>`}
      <span class="grow"></span>${job && html`<${JobButtons} job=${job} />`}
      ${run.kind !== "eval" && html`<a href=${`#/lab?${query({ from: id })}`}>Use its configuration</a>`}</div>
    <p class="soft small" style=${{ margin: ".2rem 0 0" }}>${[run.model, run.env, run.device, run.about.commit && `commit ${run.about.commit}`].filter(Boolean).join(" · ")}${run.fork && ` · forked from ${run.fork.run} at step ${run.fork.step} (dashed)${Object.entries(run.fork.changed || {}).map(([key, [was, now]]) => `, ${key} ${JSON.stringify(was)} → ${JSON.stringify(now)}`).join("")}`}</p>
    <${Problem} error=${error} />
    <div class="tabs" role="navigation" aria-label="parts of the run">${tabs.map(name => html`<a href=${"#" + runPath(id, name)} aria-current=${name === shown ? "page" : null}>${name[0].toUpperCase() + name.slice(1)}</a>`)}</div>
    ${shown === "overview" && html`<${Overview} run=${run} theme=${theme} />`}
    ${shown === "timeline" && html`<${Timeline} run=${run} />`}
    ${shown === "rollouts" && html`<${Rollouts} run=${run} asked=${asked} />`}
    ${shown === "checkpoints" && html`<${Checkpoints} run=${run} />`}
    ${shown === "doctor" && html`<${Doctor} run=${run} />`}
    ${shown === "config" && html`<${Config} run=${run} />`}
    ${shown === "logs" && html`<${Logs} run=${run} asked=${asked} />`}`;
}

function JobButtons({ job }) {
  const [error, set] = useState(null);
  const act = what => api(`/api/jobs/${job.name}/${what}`, {}).then(() => set(null), set);
  return html`<span class="row">${job.state === "running" && html`<button onClick=${() => act("stop")} title="ends after this step, with a checkpoint">Stop</button><button class="bad" onClick=${() => confirm("End it now? What it did since its last checkpoint is lost.") && act("kill")}>Kill</button>`}
    ${job.state === "queued" && html`<button onClick=${() => act("stop")}>Take out of the line</button>`}
    ${["stopped", "failed"].includes(job.state) && job.command !== "vf-eval" && html`<button class="main" onClick=${() => act("resume")}>${job.state === "failed" ? "Try again" : "Resume"}</button>`}<${Problem} error=${error} /></span>`;
}

function Overview({ run, theme }) {
  const charts = run.kind === "sft" ? SFT : RL;
  const evals = run.names.filter(name => /^eval\/.*\/reward$/.test(name));
  const own = charts.flatMap(chart => chart.lines.map(([name]) => name)).filter(name => run.names.includes(name));
  const rewards = run.names.filter(name => (run.env.includes(", ") || !name.startsWith("reward/")) && /^(reward|metrics)\/[^/]+(\/[^/]+)?$/.test(name) && !/^reward\/(mean|median|std|min|max)$/.test(name));
  const names = run.kind === "sft" ? [...own, ...evals] : [...own, "reward/std", "reward/min", "reward/max", "batch/without_signal", ...evals, ...rewards.slice(0, 12)];
  const [found, last, again] = useSeries(run.id, names, run.status === "running");
  useEffect(() => { if (run.step < last.current) again(); }, [run.step]);
  const series = useMemo(() => {
    const all = { ...found }, mean = found["reward/mean"], std = found["reward/std"], idle = found["batch/without_signal"];
    if (mean && std && mean[0].length === std[0].length) {
      all["reward/low"] = [mean[0], mean[1].map((v, i) => v - std[1][i])]; all["reward/high"] = [mean[0], mean[1].map((v, i) => v + std[1][i])];
    }
    if (idle) all.signal = [idle[0], idle[1].map(v => 1 - v)];
    return all;
  }, [found]);
  const of = lines => lines.map(([name, label, kind]) => ({ label, of: kind, data: series[name] }));
  const more = [
    ...(evals.length ? [{ title: "Evaluation", lines: evals.map(name => [name, name.split("/").slice(1, -1).join("/")]) }] : []),
    ...(rewards.length > 1 && run.kind === "rl" ? [{ title: "Parts of the reward", lines: rewards.slice(0, 6).map(name => [name, name.split("/").slice(1).join("/")]) }] : []),
  ];
  return html`<div class="row" style=${{ marginBottom: ".8rem" }}>
      ${Object.entries(run.components).map(([name, age]) => html`<span class="chip ${age < 6 ? "good" : "bad"}">${name}: ${age < 6 ? "lives" : `silent for ${ago(age)}`}</span>`)}
      ${!Object.keys(run.components).length && html`<span class="soft small">No process of it is at work.</span>`}
      <span class="grow"></span><button class="link" onClick=${() => savePlot(run.id, "png", run.name)}>PNG</button><button class="link" onClick=${() => savePlot(run.id, "svg", run.name)}>SVG</button></div>
    ${run.kind === "rl" && html`<${Verdict} run=${run} />`}
    ${!run.names.length && html`<p class="soft">No step is done yet.</p>`}
    <div class="grid">${[charts[0], ...more, ...charts.slice(1)].map(chart => html`<${Chart} key=${chart.title} theme=${theme} mark=${run.fork && run.fork.step} ...${chart} lines=${of(chart.lines)} />`)}</div>`;
}

function Verdict({ run }) {
  const { data } = usePolled(() => api(`/api/doctor?${query({ run: run.id })}`), [run.id, Math.floor(4 * Math.log2(run.step + 1)), run.status], 0);  // seldom: it reads all rollouts
  const worst = data && data.findings[0];
  return worst && html`<div class="card finding" style=${{ marginBottom: ".9rem" }}><b>${worst.title}</b> (from step ${worst.first_step} on). ${worst.evidence} <a href=${"#" + runPath(run.id, "doctor")}>What helps</a></div>`;
}

// ---------------------------------------------------------------- what the run waits for
const LANES = [
  ["Sampling", [["time/wait_for_weights", "waits for weights", "--line"], ["time/generate", "generates", "--c1"], ["part/environment", "environments work", "--c5"], ["part/scoring", "scores", "--c6"], ["time/update_weights", "takes weights", "--c3"]]],
  ["Training", [["time/wait_for_batch", "waits for rollouts", "--line"], ["time/train", "trains", "--c2"], ["time/publish_weights", "hands weights on", "--c4"], ["time/save", "saves", "--soft"]]],
];
// The seconds of sampling by what its rollouts spent theirs on; those are under way side by side.
function divided(found) {
  const names = ["model", "environment", "scoring"], whole = found["time/generate"], parts = names.map(name => found[`time/rollout/${name}`]);
  if (!whole || parts.some(part => !part || part[0].length !== whole[0].length)) return found;
  const share = (k, i) => parts[k][1][i] / (parts.reduce((sum, part) => sum + part[1][i], 0) || 1);
  const of = k => [whole[0], whole[1].map((seconds, i) => seconds * share(k, i))];
  return { ...found, "time/generate": of(0), "part/environment": of(1), "part/scoring": of(2) };
}
function Timeline({ run }) {
  const [found] = useSeries(run.id, TIMES.filter(name => run.names.includes(name)), run.status === "running");
  const [at, setAt] = useState(null);
  const series = useMemo(() => divided(found), [found]);
  const steps = (series["time/step"] || [[]])[0].slice(-120);
  if (!steps.length) return html`<p class="soft">No step is done yet.</p>`;
  const value = name => { const map = new Map((series[name] || [[], []])[0].map((s, i) => [s, series[name][1][i]])); return s => map.get(s) || 0; };
  const lanes = LANES.map(([title, parts]) => [title, parts.filter(([name]) => series[name]).map(([name, label, colour]) => ({ name, label, colour, of: value(name) }))]);
  const total = (parts, s) => parts.reduce((sum, part) => sum + part.of(s), 0);
  const sorted = steps.flatMap(s => lanes.map(([, parts]) => total(parts, s))).sort((a, b) => a - b);
  const most = 1.15 * sorted[Math.floor(.98 * (sorted.length - 1))] || 1;
  const width = 960, half = 120, w = width / Math.max(steps.length, 20);
  const bars = steps.flatMap((s, i) => lanes.flatMap(([, parts], lane) => {
    let y = 0;
    return parts.map(part => { const h = Math.max(0, Math.min(half - y, part.of(s) / most * half)); const rect = html`<rect x=${i * w} width=${Math.max(1, w - 1)} y=${lane ? half + 2 + y : half - y - h} height=${h} fill=${`var(${part.colour})`} opacity=${at === null || at === i ? 1 : .55} />`; y += h; return rect; });
  }));
  const mean = part => steps.reduce((sum, s) => sum + part.of(s), 0) / steps.length;
  const [sampling, training] = lanes.map(([, parts]) => Object.fromEntries(parts.map(part => [part.name, mean(part)])));
  const share = (lane, name) => (lane[name] || 0) / (Object.values(lane).reduce((a, b) => a + b, 0) || 1);
  const why = share(training, "time/wait_for_batch") > .25 ? "The trainer waits for rollouts: more or faster sampling helps." : share(sampling, "time/wait_for_weights") > .25 ? "The sampler waits for weights: faster training, or a higher max_async_level, helps."
    : (sampling["part/scoring"] || 0) + (sampling["part/environment"] || 0) > .4 * (sampling["time/generate"] || 0) ? "Much of sampling is the environment and its rewards: orchestrator.env.workers, or faster reward functions, help."
    : (sampling["time/generate"] || 0) > 2 * (training["time/train"] || 0) ? "Most of a step is generation." : (training["time/train"] || 0) > 2 * (sampling["time/generate"] || 0) ? "Most of a step is training." : "Neither side waits much for the other.";
  const one = at === null ? null : steps[at];
  return html`<div class="card"><div class="row"><h2>Where the seconds of a step go</h2><span class="grow"></span><b>${why}</b></div>
    <div class="scroll"><svg class="timeline" viewBox=${`0 0 ${width} ${2 * half + 4}`} width="100%" role="img" aria-label="seconds of the last steps by part" onMouseLeave=${() => setAt(null)} onMouseMove=${e => { const box = e.currentTarget.getBoundingClientRect(); const i = Math.floor((e.clientX - box.left) / box.width * width / w); setAt(i >= 0 && i < steps.length ? i : null); }}>${bars}</svg></div>
    <p class="soft small">Upwards: sampling; downwards: training; one bar a step, ${steps.length} steps up to ${steps.at(-1)}; half of the height is ${short(most)} s${one !== null ? `; step ${one}` : ""}.</p>
    <table><thead><tr><th>Side</th><th>Part</th><th class="num">${one === null ? "mean" : `step ${one}`}, s</th><th class="num">share</th></tr></thead><tbody>${lanes.flatMap(([title, parts]) => parts.map(part => html`<tr><td>${title}</td><td><span style=${{ display: "inline-block", width: ".8rem", height: ".8rem", background: `var(${part.colour})`, marginRight: ".4rem", borderRadius: "2px" }}></span>${part.label}</td><td class="num">${short(one === null ? mean(part) : part.of(one))}</td><td class="num">${(100 * (one === null ? share(title === "Sampling" ? sampling : training, part.name) : part.of(one) / (total(parts, one) || 1))).toFixed(0)} %</td></tr>`))}</tbody></table></div>`;
}

// ---------------------------------------------------------------- rollouts
const FILTERS = ["step_from", "step_to", "reward_from", "reward_to", "tokens_from", "tokens_to", "env", "stop", "unused", "text", "failed", "truncated", "group", "sort", "down", "skip"];
function Rollouts({ run, asked }) {
  const keep = changes => go(runPath(run.id, "rollouts"), { ...parse().asked, ...changes });  // what is there now, not when it was drawn
  const wanted = Object.fromEntries(FILTERS.filter(name => asked[name] !== undefined).map(name => [name, asked[name]]));
  const [reading, setReading] = useState(false), live = run.status === "running" || reading;
  const { data, error } = usePolled(() => api(`/api/rollouts?${query({ run: run.id, ...wanted })}`), [run.id, JSON.stringify(wanted), live], live ? 3 : 0);
  useEffect(() => { if (data) setReading(data.reading); }, [data]);
  const [typed, type] = useState(asked.text || "");
  useEffect(() => { type(asked.text || ""); }, [asked.text]);
  useEffect(() => { const timer = setTimeout(() => { if (typed !== (parse().asked.text || "")) keep({ text: typed, skip: "" }); }, 350); return () => clearTimeout(timer); }, [typed]);
  const field = (name, label, props = {}) => html`<label>${label}<input type="number" step="any" value=${asked[name] || ""} onChange=${e => keep({ [name]: e.target.value, skip: "" })} ...${props} /></label>`;
  const select = (name, label, values) => values.length > 1 && html`<label>${label}<select value=${asked[name] || ""} onChange=${e => keep({ [name]: e.target.value, skip: "" })}><option value="">any</option>${values.filter(Boolean).map(v => html`<option value=${v}>${v}</option>`)}</select></label>`;
  const kinds = data ? data.kinds : { env: [], stop: [], unused: [], steps: [0, 0, 0] };
  const skip = +(asked.skip || 0), chosen = asked.n ? +asked.n : null;
  const sortable = (name, label, cls = "num") => html`<th class=${cls} aria-sort=${(asked.sort || "step") === name ? (asked.down === "0" ? "ascending" : "descending") : null}><button class="link" onClick=${() => keep({ sort: name, down: (asked.sort || "step") === name && asked.down !== "0" ? "0" : "1", skip: "" })}>${label}${(asked.sort || "step") === name ? (asked.down === "0" ? " ↑" : " ↓") : ""}</button></th>`;
  const list = html`<div class="card"><div class="row small soft"><span>${data ? `${data.total.toLocaleString("en")} of ${(kinds.steps[2] || 0).toLocaleString("en")} rollouts` : "…"}</span>${data && data.reading && html`<span>reading: ${data.indexed[0]} of ${data.indexed[1]} steps</span>`}</div>
    <div class="scroll"><table><thead><tr>${run.kind === "eval" ? html`<th class="num">Example</th>` : sortable("step", "Step")}${sortable("reward", "Reward")}${run.kind !== "eval" && sortable("advantage", "Adv.")}${sortable("tokens", "Tokens")}<th>Written</th></tr></thead>
    <tbody>${data && data.rows.map(row => html`<tr key=${row.id} class="click" tabindex="0" aria-selected=${row.id === chosen} onClick=${() => keep({ n: row.id })} onKeyDown=${e => { if (e.key === "Enter") keep({ n: row.id }); }}>
      <td class="num">${run.kind === "eval" ? row.example : row.step}</td><td class="num">${row.error ? html`<span class="status failed"></span>` : short(row.reward)}</td>${run.kind !== "eval" && html`<td class="num">${short(row.advantage)}</td>`}<td class="num">${row.tokens}${row.truncated ? " ✂" : ""}</td><td><div class="one">${row.error || row.said}</div></td></tr>`)}</tbody></table></div>
    ${data && data.total > 50 && html`<div class="row" style=${{ marginTop: ".5rem" }}><button disabled=${!skip} onClick=${() => keep({ skip: Math.max(0, skip - 50) })}>Before</button><span class="small soft">${skip + 1} to ${Math.min(skip + 50, data.total)}</span><button disabled=${skip + 50 >= data.total} onClick=${() => keep({ skip: skip + 50 })}>Next</button></div>`}
    ${data && !data.total && html`<p class="soft">No rollout fits.</p>`}</div>`;
  return html`<div class="filters" role="search">
      <label>text<input type="search" placeholder="prompt, completion, answer" value=${typed} onInput=${e => type(e.target.value)} /></label>
      ${run.kind === "rl" && field("step_from", "step from")}${run.kind === "rl" && field("step_to", "to")}${field("reward_from", "reward from")}${field("reward_to", "to")}${field("tokens_from", "tokens from")}${field("tokens_to", "to")}
      ${select("env", "environment", kinds.env)}${select("stop", "ended by", kinds.stop)}${select("unused", "not used because", kinds.unused)}
      <label class="inline"><input type="checkbox" checked=${asked.truncated === "1"} onChange=${e => keep({ truncated: e.target.checked ? "1" : "", skip: "" })} /> cut off</label>
      <label class="inline"><input type="checkbox" checked=${asked.failed === "1"} onChange=${e => keep({ failed: e.target.checked ? "1" : "", skip: "" })} /> failed</label>
      ${Object.keys(wanted).length > 0 && html`<button onClick=${() => go(runPath(run.id, "rollouts"))}>Clear</button>`}</div>
    <${Problem} error=${error} />
    <div class="split">${list}${chosen ? html`<${Rollout} run=${run} n=${chosen} asked=${asked} keep=${keep} />` : html`<p class="soft">Choose a rollout to read it.</p>`}</div>`;
}

const MODES = { sampled: "sampler logprob", trained: "trainer logprob", difference: "difference", advantage: "advantage", masked: "left out of the loss", version: "policy version" };
function tint(mode, one, i, advantage, first) {
  const s = one.sampled[i], t = one.trained[i];
  const warm = x => `rgba(217,119,6,${(.5 * Math.min(1, x)).toFixed(2)})`, cold = x => `rgba(37,99,235,${(.45 * Math.min(1, x)).toFixed(2)})`, green = x => `rgba(22,163,74,${(.45 * Math.min(1, x)).toFixed(2)})`, red = x => `rgba(220,38,38,${(.45 * Math.min(1, x)).toFixed(2)})`;
  if (s === null) return "";
  if (mode === "sampled") return warm(-s / 4);
  if (mode === "trained") return t === null ? "" : warm(-t / 4);
  if (mode === "difference") return t === null ? "" : t > s ? cold((t - s) / .2) : red((s - t) / .2);
  if (mode === "advantage") return advantage > 0 ? green(.25 + advantage / 2) : advantage < 0 ? red(.25 - advantage / 2) : "";
  if (mode === "masked") return one.masked[i] ? red(1) : one.masked[i] === false ? green(.5) : "";
  return cold(.25 + .25 * ((one.version[i] - first) % 3));
}
function Tokens({ one, mode, advantage, picked, pick }) {
  const first = one.version.find(v => v !== null) || 0, place = useRef(null);
  const move = e => {
    const by = { ArrowRight: 1, ArrowLeft: -1, Home: -1e9, End: 1e9 }[e.key];
    if (!by) return;
    e.preventDefault();
    pick(Math.max(0, Math.min(one.text.length - 1, (picked ?? -1) + by)));
  };
  useEffect(() => { const el = place.current && place.current.querySelector(".picked"); if (el) el.scrollIntoView({ block: "nearest" }); }, [picked]);
  return html`<div class="tokens mono" ref=${place} tabindex="0" role="listbox" aria-label="tokens; arrow keys move" onKeyDown=${move} onClick=${e => { const i = e.target.closest("[data-i]"); if (i) pick(+i.dataset.i); }}>${one.text.map((text, i) => html`<span data-i=${i} class=${`token${one.sampled[i] === null ? " given" : ""}${picked === i ? " picked" : ""}`} style=${{ background: tint(mode, one, i, advantage, first) }}>${text.includes("\n") ? html`<span class="nl">↵</span>${text}` : text}</span>`)}${one.cut > 0 && html`<span class="soft"> … ${one.cut} more tokens</span>`}</div>`;
}

function showContent(content) {
  if (Array.isArray(content)) return content.map(part => part.text ?? (typeof part === "string" ? part : `[${part.type}]`)).join(" ");
  return typeof content === "string" ? content : content ? JSON.stringify(content, null, 1) : "";
}

function Rollout({ run, n, asked, keep }) {
  const { data, error } = usePolled(() => api(`/api/rollout?${query({ run: run.id, n })}`), [run.id, n], 0);
  const mode = asked.mode || "sampled", [picked, pick] = useState(asked.token ? +asked.token : null);
  const which = +(asked.part || 0);
  useEffect(() => { pick(asked.token ? +asked.token : null); }, [n]);
  if (!data) return html`<div class="card"><${Problem} error=${error} />${!error && html`<p class="soft">Reading …</p>`}</div>`;
  const at = data.at, one = data.sequences[which] || data.sequences[0];
  const modes = Object.keys(MODES).filter(name => name !== "trained" && name !== "difference" && name !== "masked" || one && one.trained.some(v => v !== null)).filter(name => name !== "advantage" || data.advantage !== undefined);
  const shown = modes.includes(mode) ? mode : "sampled";
  const token = picked !== null && one && picked < one.text.length ? picked : null;
  return html`<article class="card" aria-label="rollout">
    <div class="row"><h2 style=${{ margin: 0 }}>${run.kind === "rl" ? `Step ${at.step}, group ${at.grp}, rollout ${at.member}` : `Example ${at.example}, attempt ${at.member}`}</h2><span class="grow"></span>${run.kind === "rl" && html`<button onClick=${() => keep({ group: asked.group ? "" : at.grp, step_from: asked.group ? "" : at.step, step_to: asked.group ? "" : at.step, sort: "reward" })}>${asked.group ? "All groups" : "Its group alone"}</button>`}</div>
    <dl class="facts small"><dt>reward</dt><dd><b>${short(data.reward)}</b>${Object.keys(data.metrics || {}).length > 0 && html` = ${Object.entries(data.metrics).map(([name, value]) => html`<span class="chip">${name} ${short(value)}</span> `)}`}</dd>
      ${data.advantage !== undefined && html`<dt>advantage</dt><dd>${short(data.advantage)}${data.unused ? html` <span class="chip">not trained on: ${data.unused.replace(/_/g, " ")}</span>` : data.is_used ? html` <span class="chip good">trained on</span>` : ""}</dd>`}
      <dt>ended by</dt><dd>${data.stop || "–"}${data.is_truncated ? html` <span class="chip bad">cut off</span>` : ""}</dd>
      ${data.error && html`<dt>error</dt><dd class="error">${data.error}</dd>`}
      ${data.answer ? html`<dt>right answer</dt><dd class="mono">${String(data.answer)}</dd>` : ""}
      <dt>took</dt><dd>${short(data.seconds)} s${Object.keys(data.timings || {}).length > 0 && ` (${Object.entries(data.timings).map(([name, s]) => `${name} ${short(s)}`).join(", ")})`}</dd></dl>
    ${asked.group && html`<${Group} run=${run} at=${at} keep=${keep} />`}
    ${[...(data.prompt || []), ...(data.completion || [])].map(message => html`<div class=${`message ${["system", "user", "assistant", "tool"].includes(message.role) ? message.role : "user"}`}><div class="role">${message.role}${message.agent ? ` (${message.agent})` : ""}</div><pre>${showContent(message.content)}</pre>${(message.tool_calls || []).map(call => html`<pre class="soft">${"calls "}${JSON.stringify(call.function || call)}</pre>`)}</div>`)}
    ${one && one.text.length > 0 && html`<div class="row" style=${{ margin: ".7rem 0 .4rem" }}><h2 style=${{ margin: 0 }}>Tokens</h2><label class="small">coloured by <select value=${shown} onChange=${e => keep({ mode: e.target.value })}>${modes.map(name => html`<option value=${name}>${MODES[name]}</option>`)}</select></label>
      ${data.sequences.length > 1 && html`<label class="small">sequence <select value=${which} onChange=${e => keep({ part: e.target.value })}>${data.sequences.map((_, i) => html`<option value=${i}>${i + 1}</option>`)}</select></label>`}
      ${!data.decoded && html`<span class="small soft">No tokenizer is kept with the run: numbers are shown.</span>`}</div>
      <${Tokens} one=${one} mode=${shown} advantage=${data.advantage || 0} picked=${token} pick=${i => { pick(i); keep({ token: i, mode: asked.mode }); }} />
      ${token !== null && html`<dl class="facts small" style=${{ marginTop: ".5rem" }}><dt>token ${token}</dt><dd class="mono">${JSON.stringify(one.text[token])} (id ${one.ids[token]})</dd>
        ${one.sampled[token] === null ? html`<dt></dt><dd class="soft">given, not written by the model</dd>` : html`<dt>sampler</dt><dd>${one.sampled[token].toFixed(6)} (probability ${(100 * Math.exp(one.sampled[token])).toFixed(2)} %)</dd>
        ${one.trained[token] !== null && html`<dt>trainer</dt><dd>${one.trained[token].toFixed(6)}; difference ${(one.trained[token] - one.sampled[token]).toExponential(2)}; ratio ${Math.exp(one.trained[token] - one.sampled[token]).toFixed(6)}</dd><dt>loss</dt><dd>${one.masked[token] ? "left out" : "counts"}</dd>`}
        <dt>version</dt><dd>${one.version[token]}</dd>`}</dl>`}`}
  </article>`;
}

function Group({ run, at, keep }) {
  const { data } = usePolled(() => api(`/api/rollouts?${query({ run: run.id, group: at.grp, step_from: at.step, step_to: at.step, sort: "reward", down: "1" })}`), [run.id, at.grp, at.step], 0);
  return data && html`<div class="group" role="list" aria-label="rollouts of the group">${data.rows.map(row => html`<div role="listitem" class="message assistant" style=${{ outline: row.id === at.id ? "2px solid var(--accent)" : "none" }}><div class="row small"><b>${short(row.reward)}</b><span class="soft">adv. ${short(row.advantage)}, ${row.tokens} tokens</span></div><pre>${row.said}</pre><button class="link" onClick=${() => keep({ n: row.id })}>read</button></div>`)}</div>`;
}

// ---------------------------------------------------------------- the other parts of a run
function Checkpoints({ run }) {
  const [error, set] = useState(null);
  const load = name => api("/api/ticket", { run: run.id, name }).then(found => { location.href = found.url; set(null); }, set);
  const [begun, setBegun] = useState(null);
  const evaluate = name => api("/api/evaluate", { run: run.id, name, examples: 50 }).then(job => { setBegun(job); set(null); }, set);
  if (!run.checkpoints.length) return html`<p class="soft">No weights and no checkpoint yet. Weights are written by weights.interval and at the end, checkpoints by ckpt.interval.</p>`;
  const job = begun && (run.jobs.find(one => one.name === begun.name) || begun);
  return html`<${Problem} error=${error} />${job && html`<p>${job.name}: <span class="status ${job.state}">${job.state}</span>. Its rollouts are among the <a href="#/">runs</a>, its output is in the <a href="#/lab">lab</a>.</p>`}<div class="scroll"><table><thead><tr><th>What</th><th class="num">Step</th><th class="num">Size</th><th></th><th>Place</th></tr></thead><tbody>${run.checkpoints.map(one => html`<tr><td>${one.kind === "weights" ? "Model, in the hub's format" : "Checkpoint to resume from"}</td><td class="num">${one.step}</td><td class="num">${size(one.bytes)}</td><td class="row"><button disabled=${!token()} onClick=${() => load(one.name)}>Download</button>${one.kind === "weights" && run.kind === "rl" && html`<button disabled=${!token()} onClick=${() => evaluate(one.name)} title="50 examples of the run's environment, as a job">Evaluate</button>`}${one.kind === "checkpoint" && html`<code class="small">rl @ ${run.typed}/configs/rl.toml --fork ${run.typed}@${one.step} --output-dir ${run.typed}-fork --max-steps N</code>`}</td>
    <td class="mono">${run.place}/${one.name}</td></tr>`)}</tbody></table></div>`;
}

function Doctor({ run }) {
  const { data, error } = usePolled(() => api(`/api/doctor?${query({ run: run.id })}`), [run.id, Math.floor(4 * Math.log2(run.step + 1))], 0);
  if (!data) return html`<${Problem} error=${error} />${!error && html`<p class="soft">Examining …</p>`}`;
  if (!data.findings.length) return html`<div class="card finding none"><h2>${data.note ? "Too early to say" : "Nothing that is known to go wrong was found"}</h2><p>${data.note || `${data.steps} steps were looked at: collapse, length, variance, staleness, truncation, the prompt's form, entropy, failures.`}</p></div>`;
  return data.findings.map(one => html`<section class="card finding" style=${{ marginBottom: ".9rem" }}><h2>${one.title}</h2><p>From step <b>${one.first_step}</b> on. ${one.evidence}</p><b>What usually helps</b><ul>${one.helps.map(text => html`<li>${text}</li>`)}</ul>
    ${one.rollouts.length > 0 && html`<p>Rollouts that show it: ${one.rollouts.map((n, i) => html`<a href=${`#${runPath(run.id, "rollouts")}?${query({ n, step_from: one.first_step, step_to: one.first_step })}`}>${i + 1}</a> `)}</p>`}</section>`);
}

function Config({ run }) {
  return html`${Object.entries(run.about).length > 0 && html`<div class="card" style=${{ marginBottom: ".9rem" }}><dl class="facts small">${Object.entries(run.about).filter(([, v]) => typeof v !== "object").map(([name, value]) => html`<dt>${name}</dt><dd>${String(value)}</dd>`)}</dl></div>`}
    ${Object.entries(run.configs).map(([name, text]) => html`<section class="card" style=${{ marginBottom: ".9rem" }}><h2>${name}</h2><pre>${text}</pre></section>`)}`;
}

function Logs({ run, asked }) {
  const name = run.logs.includes(asked.log) ? asked.log : run.logs[0];
  const { data, error } = usePolled(() => name ? api(`/api/log?${query({ run: run.id, name })}`) : Promise.resolve(null), [run.id, name], run.status === "running" ? 3 : 0);
  const [text, set] = useState(""), end = useRef(null);
  const lines = data ? data.text.split("\n").filter(line => line.toLowerCase().includes(text.toLowerCase())) : [];
  useEffect(() => { if (end.current) end.current.scrollTop = end.current.scrollHeight; }, [data, text]);
  if (!name) return html`<p class="soft">No log is there.</p>`;
  return html`<div class="row" style=${{ marginBottom: ".6rem" }}>${run.logs.map(one => html`<button aria-pressed=${one === name} class=${one === name ? "main" : ""} onClick=${() => go(runPath(run.id, "logs"), { log: one })}>${one}</button>`)}<span class="grow"></span><input type="search" placeholder="lines with …" aria-label="filter lines" value=${text} onInput=${e => set(e.target.value)} /></div>
    <${Problem} error=${error} /><pre class="card log" ref=${end} tabindex="0">${data && data.start > 0 && "… (the end of a longer log)\n"}${lines.join("\n")}</pre>`;
}

// ---------------------------------------------------------------- several runs
function flat(toml) {
  const found = {}; let section = "";
  for (const line of toml.split("\n")) {
    const head = line.match(/^\s*\[+([^\]]+)\]+/), pair = line.match(/^\s*([\w."-]+)\s*=\s*(.*)$/);
    if (head) section = head[1] + "."; else if (pair) found[section + pair[1]] = pair[2];
  }
  return found;
}
function Compare({ asked, theme }) {
  const ids = (asked.runs || "").split("|").filter(Boolean);
  const { data, error } = usePolled(() => Promise.all(ids.map(id => api(`/api/run?${query({ run: id })}`))), [asked.runs], 4);
  const names = ["reward/mean", "loss/mean", "val/loss", "entropy/mean", "mismatch_kl/mean", "completion_len/mean", "optim/grad_norm", "batch/off_policy_level/mean", "time/step", "perf/train_throughput"];
  const { data: series } = usePolled(() => Promise.all(ids.map(id => api(`/api/series?${query({ run: id, names: names.join(",") })}`))), [asked.runs], 4);
  if (ids.length < 2) return html`<h1>Compare</h1><p>Choose two or more runs in the <a href="#/">list</a>.</p>`;
  if (!data || !series) return html`<${Problem} error=${error} />${!error && html`<p class="soft">Reading …</p>`}`;
  const label = run => run.place === "." ? run.name : run.place, configs = data.map(run => Object.assign({}, ...Object.values(run.configs).map(flat)));
  const keys = [...new Set(configs.flatMap(Object.keys))].filter(key => new Set(configs.map(config => config[key])).size > 1 && !/output_dir/.test(key)).sort();
  return html`<div class="row"><h1>Compare</h1>${data.map((run, i) => html`<a href=${"#" + runPath(run.id)}><span class="chip" style=${{ borderColor: `var(${COLOURS[i % 6]})` }}>${label(run)} (${run.kind}, ${run.status})</span></a>`)}<span class="grow"></span><button class="link" onClick=${() => savePlot(ids.join("|"), "png", "compare")}>PNG</button></div>
    <div class="grid" style=${{ margin: "1rem 0" }}>${names.map(name => html`<${Chart} key=${name} title=${name} theme=${theme} log=${name === "mismatch_kl/mean"} lines=${data.map((run, i) => ({ label: label(run), colour: COLOURS[i % 6], data: series[i][name] }))} />`)}</div>
    <section class="card scroll"><h2>What differs in their configurations</h2>${keys.length ? html`<table><thead><tr><th>Key</th>${data.map(run => html`<th>${label(run)}</th>`)}</tr></thead><tbody>${keys.map(key => html`<tr><td class="mono">${key}</td>${configs.map(config => html`<td class="mono">${config[key] ?? "–"}</td>`)}</tr>`)}</tbody></table>` : html`<p class="soft">Nothing but their directories.</p>`}</section>`;
}

// ---------------------------------------------------------------- the lab
function Lab({ asked }) {
  const { data: lab, error } = usePolled(() => api("/api/lab"), [], 2);
  const [toml, setToml] = useState(""), [command, setCommand] = useState("rl"), [place, setPlace] = useState(""), [where, setWhere] = useState("here"), [more, setMore] = useState("");
  const [told, setTold] = useState(null), [failed, setFailed] = useState(null), [begun, setBegun] = useState(null);
  const take = name => name && api(`/api/lab/recipe?${query({ name })}`).then(found => { setToml(found.toml); setCommand(found.command); }, setFailed);
  useEffect(() => { if (asked.from) api(`/api/run?${query({ run: asked.from })}`).then(run => { const names = Object.keys(run.configs), kind = run.kind === "sft" ? "sft" : "rl"; const text = run.configs[kind] || run.configs[names[0]] || ""; setToml(text.split("\n").filter(line => !/^(output_dir|resume|clean)\b/.test(line)).join("\n")); setCommand(kind); }, setFailed); }, [asked.from]);
  useEffect(() => {
    if (!toml.trim()) { setTold(null); return; }
    const timer = setTimeout(() => api("/api/lab/check", { command, toml }).then(found => { setTold(found); setFailed(null); }, setFailed), 400);
    return () => clearTimeout(timer);
  }, [toml, command]);
  const start = () => api("/api/lab/start", { command, toml, output_dir: place, where, more }).then(job => { setBegun(job); setFailed(null); setPlace(""); }, setFailed);
  if (!lab) return html`<${Problem} error=${error} />`;
  return html`<h1>Lab</h1><p class="soft">A configuration becomes a run: the command that you would type, in <span class="mono">${lab.home}</span>. ${!token() && html`<b>To start runs, open the address with the token that the dashboard printed.</b>`}</p>
    <div class="split"><section class="card"><div class="filters"><label>recipe<select aria-label="recipe" onChange=${e => take(e.target.value)}><option value="">choose …</option>${lab.recipes.map(name => html`<option value=${name}>${name}</option>`)}</select></label>
        <label>command<select aria-label="command" value=${command} onChange=${e => setCommand(e.target.value)}>${lab.commands.map(name => html`<option value=${name}>${name}</option>`)}</select></label>
        <label>output directory<input aria-label="output directory" placeholder="outputs/NAME" value=${place} onInput=${e => setPlace(e.target.value)} /></label>
        ${lab.slurm && html`<label>where<select aria-label="where" value=${where} onChange=${e => setWhere(e.target.value)}><option value="here">this machine</option><option value="slurm">Slurm</option></select></label>`}
        ${where === "slurm" && html`<label>options of hone slurm<input aria-label="options of hone slurm" placeholder="--train-gpus 1 --infer-gpus 1" value=${more} onInput=${e => setMore(e.target.value)} /></label>`}</div>
      <textarea class="toml" aria-label="configuration" spellcheck="false" value=${toml} onInput=${e => setToml(e.target.value)} placeholder="the configuration, in TOML"></textarea>
      <div class="row" style=${{ marginTop: ".5rem" }}><button class="main" disabled=${!told || !told.ok} onClick=${start}>Start</button>${told && (told.ok ? html`<span class="chip good">valid</span><span class="small soft">${told.model}${told.max_steps ? `, ${told.max_steps} steps` : ""}</span>` : html`<span class="error" role="alert">${told.error}</span>`)}</div>
      <${Problem} error=${failed} />${begun && html`<p>${begun.name} is ${begun.state}; it writes to <a href=${"#" + runPath(begun.run)}>${begun.output_dir}</a>.</p>`}</section>
    <section class="card"><h2>Started here</h2>${!lab.jobs.length && html`<p class="soft">Nothing yet.</p>`}${lab.jobs.map(job => html`<${JobLine} key=${job.name} job=${job} />`)}</section></div>`;
}
function JobLine({ job }) {
  const [open, set] = useState(false);
  const { data } = usePolled(() => open ? api(`/api/job?${query({ name: job.name })}`) : Promise.resolve(null), [open, job.name, job.state], open ? 2 : 0);
  return html`<div style=${{ borderTop: "1px solid var(--line)", padding: ".5rem 0" }}><div class="row"><b>${job.name}</b><span class="status ${job.state}">${job.state}</span><a href=${"#" + runPath(job.run)}>${job.output_dir}</a><span class="grow"></span><${JobButtons} job=${job} /><button aria-expanded=${open} onClick=${() => set(!open)}>Output</button>${!["running"].includes(job.state) && html`<button onClick=${() => api(`/api/jobs/${job.name}/remove`, {})}>Forget</button>`}</div>
    ${open && data && html`<pre class="log small" style=${{ maxHeight: "16rem" }}>${data.text || "nothing yet"}</pre>`}</div>`;
}

// ---------------------------------------------------------------- the page
const THEMES = ["auto", "light", "dark"];
function App() {
  const { parts, asked } = useRoute();
  const [theme, set] = useState(() => { try { return localStorage.getItem("hone-theme") || "auto"; } catch { return "auto"; } });
  useEffect(() => { if (theme === "auto") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = theme; try { localStorage.setItem("hone-theme", theme); } catch { /* private window */ } }, [theme]);
  const at = parts[0] || "runs";
  useEffect(() => { document.title = parts[0] === "run" ? `${parts[1]} · Hone` : "Hone"; }, [parts.join("/")]);
  const link = (name, path, label) => html`<a href=${path} aria-current=${at === name ? "page" : null}>${label}</a>`;
  return html`<header class="top"><a class="brand" href="#/">Hone</a><nav aria-label="main">${link("runs", "#/", "Runs")}${link("compare", "#/compare", "Compare")}${link("lab", "#/lab", "Lab")}</nav>
    <button onClick=${() => set(THEMES[(THEMES.indexOf(theme) + 1) % 3])} aria-label=${`colours: ${theme}`}>${{ auto: "◐", light: "☀", dark: "☾" }[theme]} ${theme}</button></header>
    <main>${at === "run" ? html`<${RunPage} key=${parts[1]} id=${parts[1]} tab=${parts[2]} asked=${asked} theme=${theme} />` : at === "compare" ? html`<${Compare} asked=${asked} theme=${theme} />` : at === "lab" ? html`<${Lab} asked=${asked} />` : html`<${RunList} />`}</main>`;
}
const place = document.getElementById("app");
place.textContent = "";
render(html`<${App} />`, place);
