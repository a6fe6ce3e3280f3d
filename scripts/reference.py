"""Writes the reference page of what Python users import: `python scripts/reference.py > docs/reference.md`."""

import inspect
from typing import Any

import hone
import hone.environments as vf

HEAD = """# Python

What `import hone` and `import hone.environments as vf` give, made from the code (`make docs`). Keys of `hone.RLConfig`
are those of `[trainer.args]` in [configuration.md](configuration.md#vf-rl). `vf.RLTrainer` and `vf.RLConfig` are those
of `hone`.
"""


def reference_page() -> str:
    parts = [
        HEAD,
        "## hone\n",
        entry("hone.RLTrainer", hone.RLTrainer),
        entry("hone.RLConfig", hone.RLConfig, False),
        entry("hone.TrainingSession", hone.TrainingSession),
        entry("hone.FrozenBase", hone.FrozenBase),
        entry("hone.Datum", hone.Datum),
        entry("hone.AdamParams", hone.AdamParams),
    ]
    parts.append("## hone.environments\n")
    parts += [entry(f"vf.{name}", getattr(vf, name)) for name in sorted(vf.__all__)]
    return "\n".join(parts)


def entry(name: str, what: Any, with_signature: bool = True) -> str:
    """The signature, the docstring, and those of public methods that have one."""
    said = [f"### `{name}`\n"]
    if with_signature and callable(what):
        said.append(f"```python\n{name.split('.')[-1]}{signature(what)}\n```\n")
    own = (
        inspect.getdoc(what)
        if inspect.isclass(what) or inspect.isroutine(what)
        else f"A type: `{what}`."
    )
    said.append(f"{to_markdown(own or '')}\n")
    for method, function in (
        inspect.getmembers(what, inspect.isroutine) if inspect.isclass(what) else []
    ):
        is_own = (getattr(function, "__module__", None) or "").startswith(
            "hone"
        ) and method in vars(what)
        if is_own and not method.startswith("_") and function.__doc__:
            words = to_markdown(inspect.getdoc(function) or "")
            said.append(f"**`{method}{signature(function)}`**: {words}\n")
    for attribute, value in vars(what).items() if inspect.isclass(what) else []:
        if isinstance(value, property) and not attribute.startswith("_") and value.__doc__:
            said.append(f"**`{attribute}`**: {' '.join(value.__doc__.split())}\n")
    return "\n".join(said)


def to_markdown(text: str) -> str:
    """Return a Google-style docstring with its sections as lists, each item on one line."""
    lines: list[str] = []
    in_section = False
    for line in text.split("\n"):
        if line in ("Args:", "Attributes:"):
            in_section = True
            lines += [f"{line[:-1]}:", ""]
        elif in_section and line.startswith("        "):
            lines[-1] += f" {line.strip()}"
        elif in_section and line.startswith("    "):
            name, _, words = line.strip().partition(": ")
            lines.append(f"- `{name}`: {words}")
        else:
            in_section = in_section and not line.strip()
            lines.append(line)
    return "\n".join(lines)


def signature(what: Any) -> str:
    try:
        found = inspect.signature(what)
    except (TypeError, ValueError):
        return "(…)"
    kept = [parameter for name, parameter in found.parameters.items() if name != "self"]
    return (
        str(found.replace(parameters=kept))
        .replace("hone.records.", "")
        .replace("hone.environments.", "")
    )


if __name__ == "__main__":
    print(reference_page(), end="")
