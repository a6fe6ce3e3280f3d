"""Print the reference page of all keys: `python -m hone.config.reference > docs/configuration.md`."""

from hone.config.base import Config, walk_entries
from hone.config.command_table import COMMANDS, import_object
from hone.config.help import TABLE_HEAD, table_row
from hone.config.lab_config import LabConfig

MIN_SHARED_ROWS = 3  # a shorter table is repeated instead of linked
HEAD = """# Configuration

Every key of the commands below, made from the types (`make docs`); `vf-eval`, `hone slurm` and `hone env` have theirs
in their `--help`. Values come from the command line, over TOML files (`@ file.toml`, later files win), over the
defaults. Keys are dotted; kebab case and snake case are the same. Lists are JSON or one bare value. A key of a list of
tables, as `--orchestrator.env.max-tokens 64`, is set in each of them, with a name before it
(`--orchestrator.env.NAME.max-tokens 64`) in that one. `None` clears a value (`"None"` in TOML); booleans are `--flag`
and `--section.no-flag`. `--dry-run` prints the resolved configuration; commands that train also write it to
`OUTPUT_DIR/configs/`, unless an earlier run is there.

A section in bold that says so is not used until one of its keys is given; `required` there means: once it is used.
A section that several commands have is listed once, at the end, with its keys relative to it.
"""


Table = tuple[str, ...]  # rows of a section's own keys


def reference_page() -> str:
    commands = {
        name: (summary, import_object(config)) for name, (config, _, summary) in COMMANDS.items()
    }
    commands["hone lab run"] = ("A job file of hosted training, run here.", LabConfig)
    sections = {name: split_sections(cls) for name, (_, cls) in commands.items()}
    shared = name_shared_sections(sections)
    parts = [HEAD]
    for name, (summary, _) in commands.items():
        rows = list(TABLE_HEAD)
        for heading, path, table in sections[name]:
            if table in shared:
                rows.append(
                    f"| **`{path}`** | section | | see [{shared[table]}](#{shared[table]}) |"
                )
                continue
            rows += filter(None, [heading])
            rows += [row.replace("| `", f"| `{path}.", 1) for row in table] if path else table
        parts.append(f"## `{name}`\n\n{summary}\n\n" + "\n".join(rows) + "\n")
    parts.append("## Sections of several commands\n")
    headings = {table: heading for name in sections for heading, _, table in sections[name]}
    for table, title in shared.items():
        words = headings[table].split(" | ")[-1].removesuffix(" |")
        parts.append(
            "\n".join(
                [f"### {title}\n", *filter(None, [words and words + "\n"]), *TABLE_HEAD, *table, ""]
            )
        )
    return "\n".join(parts)


def split_sections(cls: type[Config]) -> list[tuple[str, str, Table]]:
    """Return (row of the section, its dotted path, rows of its own keys) of each section."""
    found: list[tuple[str, str, list[str]]] = [("", "", [])]
    for one in walk_entries(cls):
        if one.is_section:
            found.append((table_row(one), one.key, []))
        else:
            found[-1][2].append(table_row(one, f"{found[-1][1]}."))
    return [(heading, path, tuple(rows)) for heading, path, rows in found]


def name_shared_sections(sections: dict[str, list[tuple[str, str, Table]]]) -> dict[Table, str]:
    """Return a title for each table of keys that several sections have.

    It is the last part of the first section's path; equal titles are numbered.
    """
    places: dict[Table, list[str]] = {}
    for of_command in sections.values():
        for _, path, table in of_command:
            if path and len(table) >= MIN_SHARED_ROWS:
                places.setdefault(table, []).append(path.removesuffix(".NAME").rpartition(".")[2])
    titles: dict[Table, str] = {}
    for table, names in places.items():
        if len(names) > 1:
            taken = sum(title.partition("-")[0] == names[0] for title in titles.values())
            titles[table] = f"{names[0]}-{taken + 1}" if taken else names[0]
    return titles


if __name__ == "__main__":
    print(reference_page(), end="")
