# ---
# jupyter:
#   jupytext:
#     formats: ipynb,src//py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Your own PDF
#
# **You learn** how to get from a PDF to an answer with its sources and a report of what was reused. It takes about
# one minute on two CPU cores. The model is SmolLM2-135M-Instruct, which `make real-model` prepares. To use your own
# file and model:
#
# ```bash
# export RAGBLEND_NOTEBOOK_PDF=~/handbook.pdf RAGBLEND_NOTEBOOK_MODEL=Qwen/Qwen3-0.6B
# jupyter lab notebooks/07_your_own_pdf.ipynb
# ```
#
# It needs, in a checkout: `pip install -e '.[demo]' jupyterlab`.

# %%
import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from ragblend import Prompt, ingest, load_engine
from ragblend.precompute import open_engine_index

workplace = TemporaryDirectory()
folder = Path(workplace.name)
(folder / "papers").mkdir()
own = os.environ.get("RAGBLEND_NOTEBOOK_PDF", "")
model = os.environ.get("RAGBLEND_NOTEBOOK_MODEL") or os.environ.get("RAGBLEND_REAL_MODEL", "../models/smollm2")

# %% [markdown]
# ## A sample PDF
# The next cell writes a page of text as a PDF, or copies your own file.

# %%
HANDBOOK = """
Rules of the Gull Rock lighthouse. The lighthouse on Gull Rock was built in 1872 of grey granite. It is kept by Tomas
Reed, who was born on the island. His deputy is Ines Falk. The lamp is lit half an hour before sunset, and put out half
an hour after sunrise. In fog the horn sounds every forty seconds, whatever the hour.

Visitors. Visitors may come from May to September, on Tuesdays and Saturdays, between ten and four. A visit costs six
crowns, and nothing for children under twelve. At most eight people may be on the stairs at once. Dogs wait in the
yard. Whoever wants to see the lamp at night asks the deputy, a week before.

Supplies. The supply boat is called the Petrel. It comes every second Monday, with oil, bread and letters. Orders must
be with the harbour office in Port Ellery on the Friday before. In winter the keeper holds oil for sixty days, and food
for thirty.

Storms. When the wind passes sixty knots, the keeper closes the shutters of the gallery and stops all visits. The storm
is entered in the green logbook, with the hour at which it began and the hour at which it ended. A broken pane is
replaced within a day; twelve spare panes are kept under the stairs.
"""


def as_pdf(text):
    """Return a PDF of one page with this text."""
    lines = [line.replace("(", r"\(").replace(")", r"\)") for line in text.strip().splitlines()]
    page = "BT /F 10 Tf 14 TL 50 780 Td " + " ".join(f"({line}) Tj T*" for line in lines) + " ET"
    objects = [
        "<</Type/Catalog/Pages 2 0 R>>",
        "<</Type/Pages/Kids[3 0 R]/Count 1>>",
        "<</Type/Page/Parent 2 0 R/MediaBox[0 0 595 842]/Contents 4 0 R/Resources<</Font<</F 5 0 R>>>>>>",
        f"<</Length {len(page)}>>stream\n{page}\nendstream",
        "<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    body, places = "%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        places.append(len(body))
        body += f"{number} 0 obj{content} endobj\n"
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    return f"{body}xref\n0 6\n0000000000 65535 f \n{table}trailer<</Size 6/Root 1 0 R>>\nstartxref\n{len(body)}\n%%EOF"


if own:
    shutil.copy(Path(own).expanduser(), folder / "papers")
else:
    (folder / "papers" / "handbook.pdf").write_text(as_pdf(HANDBOOK), encoding="latin-1")
print(*(path.name for path in (folder / "papers").iterdir()))

# %% [markdown]
# ## Ingest
# `ingest` reads the PDF, splits it into chunks, and embeds them for the search. It computes and stores the KV of every
# chunk. A second run computes nothing new.

# %%
SYSTEM = "Answer the question from the texts, with a short sentence."
engine = load_engine(model, store=folder / "kv", system=SYSTEM)
index = open_engine_index(folder / "index", engine, chunk_size=96)
for _ in range(2):
    done = ingest(folder / "papers", engine, index, chunk_size=96)
    print(
        f"{done.num_documents} document, {done.num_chunks} chunks: {done.num_new_kv} KV computed now, "
        f"{done.num_known_kv} known; the store holds {done.store_bytes / 2**20:.1f} MiB"
    )

# %% [markdown]
# ## Ask
# The prompt has the four best chunks and the question. `blend` is the mode of `ragblend ask`; `full` answers the same
# prompt without stored KV, for comparison.


# %%
def ask(question, mode="blend"):
    """Return the answer, its sources and the report."""
    hits = index.search(question, 4)
    found = engine.generate(Prompt([hit.chunk for hit in hits], question, SYSTEM), mode=mode, max_tokens=32)
    return found.text.strip(), hits, found.report


QUESTIONS = (
    ["What is this document about?"]
    if own
    else ["Who keeps the lighthouse on Gull Rock?", "What is the supply boat called?", "What does a visit cost?"]
)
for question in QUESTIONS:
    text, hits, report = ask(question)
    print(f"{question}\n  blend  {text}\n  full   {ask(question, 'full')[0]}")
    for hit in hits[:2]:
        print(
            f"  source {Path(hit.chunk.source).name}, score {hit.score:.2f}:",
            f"{' '.join(hit.chunk.text.split())[:60]} ...",
        )
    print()

# %% [markdown]
# The model is very small and makes mistakes: a visit costs six crowns. [Notebook 04](04_quality_vs_ratio.ipynb)
# measures over many questions how close blending is to full prefill.
#
# ## The report
# Every answer has a report of its chunks. `exact`: the chunk follows the same prefix as when it was computed.

# %%
print(
    f"{report.prompt_tokens} tokens: {report.num_reused_tokens} reused, {report.num_recomputed_tokens} recomputed",
    end=" ",
)
print(
    f"by rule {report.rule}, {report.prompt_tokens - report.num_reused_tokens - report.num_recomputed_tokens} computed"
)
for chunk in report.chunks:
    kind = "exact" if chunk.exact else "as stored"
    print(f"  {chunk.num_tokens:>4} tokens, {chunk.num_recomputed_tokens:>3} recomputed, {kind}")

# %% [markdown]
# The same with the command line, which keeps index and store between runs:
#
# ```bash
# ragblend ingest handbook.pdf --model models/smollm2
# ragblend ask "Who keeps the lighthouse?" --model models/smollm2 --show-sources
# ```

# %%
index.close()
engine.close()
workplace.cleanup()
