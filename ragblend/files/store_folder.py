"""Names of the files in a store's folder.

STORE/kv/ab/...                                      entries (see `disk`); `kv_dir` names another folder for them
STORE/catalog.sqlite                                 documents, chunks, vectors, texts (see `catalog`)
STORE/vectors.faiss                                  vectors for searches, derived from the catalogue (see `index`)
STORE/store.json, context.json, models/, ...         settings and metadata of the store (see `disk`)
"""

from __future__ import annotations

DEFAULT_STORE = "ragblend-data"
KV_DIR = "kv"
CATALOG_FILE = "catalog.sqlite"
VECTORS_FILE = "vectors.faiss"
ENTRY_SUFFIX, DAMAGED_SUFFIX = ".safetensors", ".damaged"
EVICTED_MARK = "evicted"
"""An empty file in the folder of the entries. It exists once an entry was evicted; a missing entry is then no error."""
