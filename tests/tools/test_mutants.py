"""Every fault of tools/mutants.py has one place in the package, and changes what is there."""

import ast

import pytest

from tools.mutants import Fault, locate, read_faults

SOURCE = """
class Store:
    def get(self, é, start, end):
        return [é[start + 1], é[end + 1]] + [len(é) - (start if é else end)]

    def put(self):
        return self.a[1 + 1]
"""


@pytest.fixture
def package(tmp_path):
    (tmp_path / "ragblend" / "store").mkdir(parents=True)
    (tmp_path / "ragblend" / "store" / "disk.py").write_text(SOURCE, encoding="utf-8")
    return tmp_path


def test_there_are_thirty_faults_with_different_names():
    assert len({fault.name for fault in read_faults()}) == len(read_faults()) == 30


@pytest.mark.parametrize("fault", read_faults(), ids=lambda fault: fault.name)
def test_a_fault_changes_exactly_one_place_and_the_file_still_parses(fault):
    mutation = locate(fault)
    assert ast.dump(ast.parse(mutation.before)) != ast.dump(ast.parse(mutation.after))
    before, after = mutation.before.splitlines(), mutation.after.splitlines()
    assert before[: mutation.lines.start - 1] == after[: mutation.lines.start - 1]
    num_after = len(before) - mutation.lines.stop + 1
    assert before[len(before) - num_after :] == after[len(after) - num_after :]


def test_a_letter_matches_any_expression_also_after_letters_of_several_bytes(package):
    mutation = locate(
        Fault("swapped", "store", "Store.get", "len(A) - (B if A else C)", "len(A) - (C if A else B)"), package
    )
    assert mutation.after == SOURCE.replace(
        "len(é) - (start if é else end)", "(len((é)) - ((end) if (é) else (start)))"
    )


@pytest.mark.parametrize(("scope", "num_places"), [("get", 2), ("Store.remove", 0)])
def test_a_pattern_with_no_or_several_places_is_an_error(package, scope, num_places):
    with pytest.raises(ValueError, match=f"fault off-by-one matches {num_places} places"):
        locate(Fault("off-by-one", "store", scope, "A[B + 1]", "A[B]"), package)
