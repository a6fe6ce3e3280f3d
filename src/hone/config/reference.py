"""Print the reference page of all keys: `python -m hone.config.reference > docs/configuration.md`."""

from hone.config.command_table import COMMANDS, import_object
from hone.config.help import reference_table
from hone.config.lab_config import LabConfig

HEAD = """# Configuration

Every key of the commands below, made from the types (`make docs`); `vf-eval`, `hone slurm` and `hone env` have theirs
in their `--help`. Values come from the command line, over TOML files (`@ file.toml`, later files win), over the
defaults. Keys are dotted; kebab case and snake case are the same. Lists are JSON or one bare value. A key of a list of
tables, as `--orchestrator.env.max-tokens 64`, is set in each of them, with a name before it
(`--orchestrator.env.NAME.max-tokens 64`) in that one. `None` clears a value (`"None"` in TOML); booleans are `--flag`
and `--section.no-flag`. `--dry-run` prints the resolved configuration; commands that train also write it to
`OUTPUT_DIR/configs/`, unless an earlier run is there.

A section in bold that says so is not used until one of its keys is given; `required` there means: once it is used.
"""


def reference_page() -> str:
    parts = [HEAD]
    for command, (config, _, summary) in COMMANDS.items():
        parts.append(f"## `{command}`\n\n{summary}\n\n{reference_table(import_object(config))}\n")
    parts.append(
        f"## `hone lab run`\n\nA job file of hosted training, run here.\n\n{reference_table(LabConfig)}\n"
    )
    return "\n".join(parts)


if __name__ == "__main__":
    print(reference_page(), end="")
