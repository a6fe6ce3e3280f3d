// The tokens of a rollout, coloured by what sampler, trainer or loss say about them.
import { html, useEffect, useRef, useState } from "/assets/vendor/preact-htm.js";
import { changeParameters } from "/assets/routes.js";

const MODES = {
  sampled: "sampler logprob",
  trained: "trainer logprob",
  difference: "difference",
  advantage: "advantage",
  masked: "masked by the loss",
  version: "policy version",
};
const NEEDS_TRAINED = ["trained", "difference", "masked"];
const MOVES = { ArrowRight: 1, ArrowLeft: -1, Home: -1e9, End: 1e9 };

const shade = (rgb, opacity, x) => `rgba(${rgb},${(opacity * Math.min(1, x)).toFixed(2)})`;
const warm = (x) => shade("217,119,6", 0.5, x);
const cold = (x) => shade("37,99,235", 0.45, x);
const green = (x) => shade("22,163,74", 0.45, x);
const red = (x) => shade("220,38,38", 0.45, x);

function tokenColor(mode, one, i, advantage, firstVersion) {
  const sampled = one.sampled[i];
  const trained = one.trained[i];
  if (sampled === null) return "";
  if (mode === "sampled") return warm(-sampled / 4);
  if (mode === "version") return cold(0.25 + 0.25 * ((one.version[i] - firstVersion) % 3));
  if (mode === "advantage") {
    if (advantage > 0) return green(0.25 + advantage / 2);
    return advantage < 0 ? red(0.25 - advantage / 2) : "";
  }
  if (mode === "masked") {
    if (one.masked[i]) return red(1);
    return one.masked[i] === false ? green(0.5) : "";
  }
  if (trained === null) return "";
  if (mode === "trained") return warm(-trained / 4);
  return trained > sampled ? cold((trained - sampled) / 0.2) : red((sampled - trained) / 0.2);
}

export function TokenView({ data, asked }) {
  const number = +(asked.part || 0);
  const one = data.sequences[number] || data.sequences[0];
  const wanted = asked.token ? +asked.token : null;
  const [picked, setPicked] = useState(wanted);
  useEffect(() => setPicked(wanted), [data]);
  if (!one || !one.text.length) return null;
  const isTrained = one.trained.some((logprob) => logprob !== null);
  const modes = Object.keys(MODES).filter(
    (name) =>
      (isTrained || !NEEDS_TRAINED.includes(name)) &&
      (name !== "advantage" || data.advantage !== undefined),
  );
  const mode = modes.includes(asked.mode) ? asked.mode : "sampled";
  const token = picked !== null && picked < one.text.length ? picked : null;
  const pick = (i) => {
    setPicked(i);
    changeParameters({ token: i });
  };
  return html`<div class="row" style=${{ margin: ".7rem 0 .4rem" }}>
      <h2 style=${{ margin: 0 }}>Tokens</h2>
      <label class="small"
        >colored by${" "}
        <select value=${mode} onChange=${(e) => changeParameters({ mode: e.target.value })}>
          ${modes.map((name) => html`<option value=${name}>${MODES[name]}</option>`)}
        </select></label
      >
      ${
        data.sequences.length > 1 &&
        html`<label class="small"
          >sequence${" "}
          <select value=${number} onChange=${(e) => changeParameters({ part: e.target.value })}>
            ${data.sequences.map((_, i) => html`<option value=${i}>${i + 1}</option>`)}
          </select></label
        >`
      }
      ${
        !data.decoded &&
        html`<span class="small soft">The run keeps no tokenizer, so token ids are shown.</span>`
      }
    </div>
    <${Tokens}
      one=${one}
      mode=${mode}
      advantage=${data.advantage || 0}
      picked=${token}
      pick=${pick}
    />
    ${token !== null && html`<${TokenFacts} one=${one} i=${token} />`}`;
}

function Tokens({ one, mode, advantage, picked, pick }) {
  const firstVersion = one.version.find((version) => version !== null) || 0;
  const place = useRef(null);
  const move = (event) => {
    const by = MOVES[event.key];
    if (!by) return;
    event.preventDefault();
    pick(Math.max(0, Math.min(one.text.length - 1, (picked ?? -1) + by)));
  };
  const select = (event) => {
    const token = event.target.closest("[data-i]");
    if (token) pick(+token.dataset.i);
  };
  useEffect(() => {
    const element = place.current && place.current.querySelector(".picked");
    if (element) element.scrollIntoView({ block: "nearest" });
  }, [picked]);
  const classOf = (i) =>
    `token${one.sampled[i] === null ? " given" : ""}${picked === i ? " picked" : ""}`;
  return html`<div
    class="tokens mono"
    ref=${place}
    tabindex="0"
    role="listbox"
    aria-label="tokens; arrow keys move"
    onKeyDown=${move}
    onClick=${select}
  >
    ${one.text.map(
      (text, i) =>
        html`<span
          data-i=${i}
          class=${classOf(i)}
          style=${{ background: tokenColor(mode, one, i, advantage, firstVersion) }}
          >${text.includes("\n") ? html`<span class="nl">↵</span>${text}` : text}</span
        >`,
    )}
    ${one.cut > 0 && html`<span class="soft"> … ${one.cut} more tokens</span>`}
  </div>`;
}

function TokenFacts({ one, i }) {
  const sampled = one.sampled[i];
  const trained = one.trained[i];
  const isWritten = sampled !== null;
  const probability = isWritten ? (100 * Math.exp(sampled)).toFixed(2) : "";
  return html`<dl class="facts small" style=${{ marginTop: ".5rem" }}>
    <dt>token ${i}</dt>
    <dd class="mono">${JSON.stringify(one.text[i])} (id ${one.ids[i]})</dd>
    ${
      !isWritten &&
      html`<dt></dt>
        <dd class="soft">part of the prompt</dd>`
    }
    ${
      isWritten &&
      html`<dt>sampler</dt>
        <dd>${sampled.toFixed(6)} (probability ${probability} %)</dd>`
    }
    ${
      isWritten &&
      trained !== null &&
      html`<dt>trainer</dt>
        <dd>
          ${trained.toFixed(6)}; difference ${(trained - sampled).toExponential(2)}; ratio${" "}
          ${Math.exp(trained - sampled).toFixed(6)}
        </dd>
        <dt>loss</dt>
        <dd>${one.masked[i] ? "masked" : "counted"}</dd>`
    }
    ${
      isWritten &&
      html`<dt>version</dt>
        <dd>${one.version[i]}</dd>`
    }
  </dl>`;
}
