"""The effective configuration as a TOML file that says where each value comes from."""

from collections.abc import Iterator

from pyshim.config.effective import Effective, Setting
from pyshim.config.keys import Table, Verdict, document_table
from pyshim.config.toml_text import toml_value


def effective_toml(effective: Effective, *, everything: bool) -> str:
    """Reads as the same configuration; without `everything`, keys that nobody set and nothing reads are left out."""
    lines = [f"# {effective.source.path}"]
    for table in Table:
        rows = [
            setting
            for setting in effective.settings.values()
            if setting.key.table is table and (everything or _counts(setting))
        ]
        if rows:
            lines += ["", f"[{document_table(table, effective.hypervisor)}]", *_rows(rows)]
    return "\n".join(lines) + "\n"


def _rows(rows: list[Setting]) -> Iterator[str]:
    for setting in rows:
        remark = "" if setting.key.verdict is Verdict.HONOURED else f"; {setting.key.verdict}: {setting.key.why}"
        yield f"{setting.key.name} = {toml_value(setting.value)}  # {_one_line(setting.origin)}{remark}"


def _counts(setting: Setting) -> bool:
    return setting.key.verdict is Verdict.HONOURED or not setting.is_default or bool(setting.annotation)


def _one_line(text: str) -> str:
    """File names may hold what a TOML comment may not."""
    return "".join(char if char.isprintable() else "?" for char in text)
