"""Generate ragblend/option_keywords.py: the types of the options in ragblend/options.py as keyword arguments.

python -m tools.option_keywords
"""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from ragblend import options
from ragblend.options import FLEXIBLE_NAMES, GenerationOptions, LoadOptions, ModelOptions, TierOptions

FILE = Path(__file__).parents[1] / "ragblend" / "option_keywords.py"
HEAD = '''"""Types of options as keyword arguments, for type checkers.

Generated from the dataclasses in `options` by `python -m tools.option_keywords`. Change the options there.
"""

from __future__ import annotations
'''


def source() -> str:
    """Return the text of the file."""
    tiers, model = _annotations(TierOptions), _annotations(ModelOptions) | dict.fromkeys(FLEXIBLE_NAMES, "Any")
    loading = {name: kind for name, kind in _annotations(LoadOptions).items() if name not in tiers}
    classes = [
        _class("TierKeywords", "TypedDict", "TierOptions", tiers),
        _class("ModelKeywords", "TypedDict", "the keyword arguments of `ModelOptions.from_keywords`", model),
        _class("LoadKeywords", "TierKeywords, ModelKeywords", "LoadOptions and ModelOptions", loading),
        _class("GenerationKeywords", "TypedDict", "GenerationOptions", _annotations(GenerationOptions)),
    ]
    text = "\n\n".join(classes)
    words = set(re.findall(r"\w+", text))
    names = sorted(name for name in vars(options) if name in words and name not in ("Any", "Mapping", "Sequence"))
    names = [name for name in names if not isinstance(getattr(options, name), type)]
    containers = ", ".join(name for name in ("Mapping", "Sequence") if name in words)
    imports = (
        f"from collections.abc import {containers}\nfrom typing import Any, TypedDict\n\n"
        f"from ragblend.options import {', '.join(names)}\n"
    )
    return f"{HEAD}\n{imports}\n\n{text}"


def _annotations(dataclass: Any) -> dict[str, str]:
    """Return the types of a dataclass's fields, as they are written, by name."""
    return {each.name: str(each.type) for each in fields(dataclass)}


def _class(name: str, bases: str, described: str, types: dict[str, str]) -> str:
    lines = [f"    {field}: {kind}" for field, kind in types.items()]
    docstring = f'    """Types of {described}."""'
    return "\n".join([f"class {name}({bases}, total=False):", docstring, "", *lines]) + "\n"


if __name__ == "__main__":
    FILE.write_text(source(), encoding="utf-8")
