"""What was compiled for each range, written down and compared; without vLLM."""

from __future__ import annotations

import json

import pytest
import torch
from fake_vllm import compile_something
from traced_graph import traced

from fusion_evidence.lib.service.vllm_evidence import (
    INDEX,
    Evidence,
    in_cache,
    launches,
    listing,
    prefill_identical,
)

X = torch.ones(2, 3)


def small(x):
    return (x * 2 + 1).relu()


def compiled_by_inductor():
    torch._dynamo.reset()
    return torch.compile(small, dynamic=False)(X)


def test_a_graph_is_told_from_another_but_not_by_its_names():
    one = traced(lambda x: (x * 2 + 1).relu(), X)
    same = traced(lambda y: (y * 2 + 1).relu(), X)
    assert listing(one) == listing(same)
    assert listing(one) != listing(traced(lambda x: (x * 3 + 1).relu(), X))
    assert listing(one) != listing(traced(lambda x: (x * 2 + 1).relu(), torch.ones(2, 4)))
    for node in list(one.graph.nodes):
        node.name = f"other_{node.name}"
    assert listing(one) == listing(same)


def written(tmp_path, name, ranges):
    """Evidence of pieces with a digest for each of graph, source and binary."""
    folder = tmp_path / name
    folder.mkdir()
    entries = [
        {
            "piece": piece,
            "first": first,
            "last": last,
            "graph_sha256": graph,
            "code": [
                {"name": "n", "source_sha256": s, "configs": {"k": c}, "binaries": {"k": b}}
                for s, c, b in code
            ],
        }
        for (piece, first, last), (graph, code) in ranges.items()
    ]
    (folder / INDEX).write_text(json.dumps(entries))
    return folder


CODE = ("s", {"XBLOCK": 1}, "b")


def answers(a, b):
    frame = prefill_identical(a, b)
    return {
        (row.first, row.last, row.what): (None if row.identical is None else bool(row.identical))
        for row in frame.astype({"identical": object}).where(frame.notna(), None).itertuples()
    }


def test_a_range_is_identical_when_all_its_pieces_are(tmp_path):
    a = written(tmp_path, "a", {(0, 1, 1): ("g", [CODE]), (1, 1, 1): ("h", [CODE])})
    b = written(
        tmp_path,
        "b",
        {(0, 1, 1): ("g", [CODE]), (1, 1, 1): ("h", [("s", {"XBLOCK": 8}, "other")])},
    )
    assert set(answers(a, a).values()) == {True}
    found = answers(a, b)
    assert found[1, 1, "graph"] is found[1, 1, "source"] is True
    assert found[1, 1, "config"] is found[1, 1, "binary"] is False
    assert prefill_identical(a, b).pieces.unique().tolist() == [2]


def test_code_that_one_made_alone_is_other_code(tmp_path):
    a = written(tmp_path, "a", {(0, 1, 9): ("g", [CODE])})
    b = written(tmp_path, "b", {(0, 1, 9): ("g", [])})
    assert answers(a, b)[1, 9, "graph"] is True
    assert answers(a, b)[1, 9, "source"] is False


def test_what_nobody_kept_is_no_answer(tmp_path):
    unknown = ("s", {}, None)
    a = written(tmp_path, "a", {(0, 1, 9): ("g", [unknown])})
    found = answers(a, a)
    assert found[1, 9, "source"] is True
    assert found[1, 9, "binary"] is None


def test_other_pieces_are_refused(tmp_path):
    a = written(tmp_path, "a", {(0, 1, 1): ("g", [])})
    b = written(tmp_path, "b", {(0, 1, 9): ("g", [])})
    with pytest.raises(ValueError, match=r"other pieces or ranges: \[\(0, 1, 1\), \(0, 1, 9\)\]"):
        prefill_identical(a, b)
    with pytest.raises(ValueError, match="holds no evidence"):
        prefill_identical(a, tmp_path)


def test_a_compilation_is_watched_and_written(tmp_path):
    """With the code that Inductor makes of it, here for two sizes of one graph."""
    module = traced(small, X)
    evidence = Evidence(tmp_path / "kept")
    assert torch.equal(
        evidence.watch(module, 3, 1, 8, compiled_by_inductor), torch.full((2, 3), 3.0)
    )
    evidence.watch(module, 3, 1, 1, lambda: None)  # found again among what was compiled
    assert evidence.save() == 2
    entries = json.loads((tmp_path / "kept" / INDEX).read_text())
    assert [(one["piece"], one["first"], one["last"]) for one in entries] == [(3, 1, 8), (3, 1, 1)]
    assert [len(one["code"]) for one in entries] == [1, 0]
    assert entries[0]["graph_sha256"] == entries[1]["graph_sha256"]
    assert (tmp_path / "kept" / "003_1-8.graph.txt").read_text() == listing(module)
    assert "relu" in (tmp_path / "kept" / "003_1-8.0.py").read_text()
    assert all(entries[0]["code"][0]["binaries"].values())


def test_a_compilers_cache_is_read_without_the_names_of_its_files(tmp_path):
    found = []
    for name, block in (("one", 64), ("other", 128)):
        compile_something(tmp_path / name, block)
        found.append(in_cache(tmp_path / name))
    (one, chosen), (other, others) = found
    assert len(one) == 1
    assert one == other
    assert chosen == {"kernel": {"XBLOCK": 64, "num_warps": 4}}
    assert others == {"kernel": {"XBLOCK": 128, "num_warps": 4}}


def test_what_cannot_be_read_of_a_cache_is_left_out(tmp_path):
    assert in_cache(tmp_path) == in_cache(tmp_path / "nowhere") == ([], {})
    (tmp_path / "ab").mkdir()
    (tmp_path / "ab" / "open.py").write_text("def call(args:\n    (")
    (tmp_path / "ab" / "bytes.py").write_bytes(b"def call(\xff")
    (tmp_path / "ab" / "half.best_config").write_text('{"XBLOCK": ')
    (tmp_path / "ab" / "list.best_config").write_text("[]")
    assert in_cache(tmp_path) == ([], {})


def test_the_kernels_of_a_graph_for_one_size_are_counted(tmp_path):
    evidence = Evidence(tmp_path)
    evidence.watch(traced(small, X), 1, 2, 2, compiled_by_inductor)
    evidence.save()
    assert launches(tmp_path, 1, 2) == 1
    assert launches(tmp_path, 1, 4) is None
    with pytest.raises(ValueError, match="holds no evidence"):
        launches(tmp_path / "nowhere", 1, 2)
