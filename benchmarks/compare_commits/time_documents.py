"""Fills a store with documents, then times a step of `many_documents` for each line that it reads.

`compare_commits` runs it in each tree. Argument: the number of documents. A line names a step of STEPS.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from time import perf_counter, sleep

import torch
from langchain_core.documents import Document

from benchmarks.many_documents import ManyDocuments, text_of

STEPS = ("add", "replace", "match", "add and match", "remove", "open")


def main(count: int) -> None:
    """Print a line when the store is filled, and a line of JSON per measurement, in milliseconds."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        many = ManyDocuments(Path(folder))
        many.grow(count)
        os.sync()  # else the disk still writes what filled the store while steps are timed
        sleep(3)  # the disk store lists a folder again if it has just changed
        new, old = itertools.count(count), iter(Random(0).sample(range(2, count), k=count - 2))

        def add(number: int, document: int) -> None:
            many.store.add_documents([Document(text_of(number), id=str(document))])

        def add_and_match() -> None:
            number = next(new)
            add(number, number)
            many._match(number)

        steps: dict[str, Callable[[], object]] = {
            "add": lambda: add(number := next(new), number),
            "replace": lambda: add(next(new), next(old)),
            "match": lambda: many._match(next(old)),
            "add and match": add_and_match,
            "remove": lambda: many.store.delete([str(next(old))]),
        }
        for step in steps.values():
            step()
        print("filled", flush=True)
        for line in sys.stdin:
            name = line.strip()
            if name == "open":
                seconds = many._open_in_a_new_process()
            else:
                start_s = perf_counter()
                steps[name]()
                seconds = perf_counter() - start_s
            print(json.dumps(1e3 * seconds), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
