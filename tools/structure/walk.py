"""Trace of the ragblend functions that a warm `ChatBlend.invoke` calls, with the default rule.

    python -m tools.structure.walk [--json]

Each function counts once. Lambdas and comprehensions belong to the function that contains them. The prompt has three
stored chunks, and the answer is one token.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import ragblend
from ragblend import ChatBlend
from ragblend.demo.corpus import sample_corpus
from ragblend.engine.loop import EngineLoop
from ragblend.precompute import precompute_documents

PACKAGE = Path(ragblend.__file__).parent


def walk(call: Callable[[], object], loop: EngineLoop) -> dict[str, list[str]]:
    """Return {file: functions that `call` enters, in order}, in this thread and in the engine's `loop`."""
    seen: dict[str, list[str]] = {}
    is_called = False

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if (
            is_called
            and event == "call"
            and code.co_filename.startswith(str(PACKAGE))
            and not code.co_name.startswith("<")
        ):
            functions = seen.setdefault(str(Path(code.co_filename).relative_to(PACKAGE)), [])
            if code.co_qualname not in functions:
                functions.append(code.co_qualname)

    threading.setprofile(note)
    loop.call(lambda: sys.setprofile(note))
    sys.setprofile(note)
    try:
        is_called = True
        call()
    finally:
        is_called = False
        sys.setprofile(None)
        loop.call(lambda: sys.setprofile(None))
        threading.setprofile(None)
    return seen


def blended_call() -> dict[str, list[str]]:
    """Return `walk` of the third call of a chain, after models were loaded and chunks were read into memory."""
    chunks = [chunk for record in sample_corpus().records[:1] for chunk in record.chunks[:3]]
    with tempfile.TemporaryDirectory() as store:
        llm = ChatBlend(model="demo", store=store, max_tokens=1)
        precompute_documents(chunks, llm)
        prompt = "\n\n".join([*chunks, "Who works there?"])
        for _ in range(2):
            llm.invoke(prompt)
        return walk(lambda: llm.invoke(prompt), llm.engine.loop)


def main() -> None:
    """Print the functions of each file, and their number."""
    parser = argparse.ArgumentParser(description="Trace one blended LangChain call.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    seen = blended_call()
    count = sum(map(len, seen.values()))
    if options.json:
        print(json.dumps({"num_files": len(seen), "num_functions": count, "files": seen}, indent=1))
        return
    for file, functions in seen.items():
        print(f"{file}: {', '.join(functions)}")
    print(f"{len(seen)} files, {count} functions")


if __name__ == "__main__":
    main()
