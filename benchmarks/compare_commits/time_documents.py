"""Fills a store with documents, then times the steps of `many_documents` for each line that it reads.

`compare_commits` runs it in each tree. Argument: the number of documents. Each time the steps run twice, and the second
run counts: a process that has waited for the other tree is slow at first, and one tree's first steps may take longer.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.many_documents import REPEATS, ManyDocuments

STEP = 37 * REPEATS  # moves the documents that the next measurement replaces and removes to others


def main(count: int) -> None:
    """Print a line when the store is filled, and a line of JSON per measurement, in milliseconds."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        many = ManyDocuments(Path(folder))
        many.grow(count)
        os.sync()  # else the disk still writes what filled the store while steps are timed
        print("filled", flush=True)
        for _ in sys.stdin:
            for _ in range(2):
                milliseconds = many.measure()
                many.count += STEP
            del milliseconds["num_documents"]
            print(json.dumps(milliseconds), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
