"""Self-contained HTML page of rollouts: a summary, and each conversation with its reward."""

import html
import json
from pathlib import Path
from typing import Any

from hone.text.messages import show_message, show_role

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
h1 { font-size: 1.4rem } table { border-collapse: collapse } td, th { padding: .1rem .8rem .1rem 0; text-align: left }
details { border-top: 1px solid #ddd; padding: .4rem 0 } summary { cursor: pointer }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .3rem 0; padding: .4rem .6rem; border-radius: .3rem }
.system { background: #f3f3f3 } .user { background: #eef4fb }
.assistant { background: #eefaf0 } .tool { background: #fbf5e9 }
.role { color: #666; font-size: .8rem } .bad { color: #b00 } input, select { font: inherit; margin-right: 1rem }
@media (prefers-color-scheme: dark) { body { background: #181818; color: #ddd } details { border-color: #444 }
.system { background: #262626 } .user { background: #1d2a38 }
.assistant { background: #1c2e20 } .tool { background: #332c1c } }
"""
SCRIPT = """
const rows = [...document.querySelectorAll('details')], find = document.getElementById('find');
const order = document.getElementById('order'), list = document.getElementById('rollouts');
function show() {
  const words = find.value.toLowerCase();
  for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(words);
}
function sort() {
  const sign = {low: 1, high: -1}[order.value];
  const key = sign ? r => sign * r.dataset.reward : r => r.dataset.number;
  list.append(...rows.sort((a, b) => key(a) - key(b)));
}
find.oninput = show; order.onchange = sort;
"""


def write_page(file: Path, settings: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    summary = "".join(
        f"<tr><th>{_render_text(k)}</th><td>{_render_text(v)}</td></tr>"
        for k, v in settings.items()
    )
    body = "\n".join(_render_rollout(number, row) for number, row in enumerate(rows))
    title = f"{settings.get('env', '')} by {settings.get('model', '')}"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(
        "<!doctype html><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>{_render_text(title)}</title>"
        f"<style>{STYLE}</style><h1>{_render_text(title)}</h1><table>{summary}</table><p>"
        "<input id=find placeholder='find in rollouts'><select id=order><option value=''>in their order</option>"
        "<option value=low>lowest reward first</option><option value=high>highest reward first</option></select>"
        f"<div id=rollouts>{body}</div><script>{SCRIPT}</script>\n"
    )


def _render_rollout(number: int, row: dict[str, Any]) -> str:
    said = "".join(map(_render_message, [*row["prompt"], *row["completion"]]))
    parts = " ".join(f"{name} {value:g}" for name, value in row["metrics"].items())
    worth = (
        f"<span class=bad>{_render_text(row['error'])}</span>"
        if row["error"]
        else f"reward {row['reward']:.3f}"
    )
    reward = -1e9 if row["error"] else row["reward"]
    return (
        f"<details data-number={number} data-reward={reward}>"
        f"<summary>example {_render_text(row['example_id'])}: {worth}</summary>{said}<p>{_render_text(parts)}"
        f"<br>right answer: {_render_text(row['answer'])}; ended by {_render_text(row.get('stop') or 'nothing')}; "
        f"{row['seconds']:.2f} s</details>"
    )


def _render_message(message: dict[str, Any]) -> str:
    role = message["role"] if message["role"] in ("system", "user", "assistant", "tool") else "user"
    text = _render_text(show_message(message))
    label = _render_text(show_role(message))
    return f"<div class=role>{label}</div><pre class={role}>{text}</pre>"


def _render_text(value: Any) -> str:
    return html.escape(
        value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    )
