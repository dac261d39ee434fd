"""Typed parameters: read from the notebook, converted from text, checked before a kernel."""

from __future__ import annotations

import pytest

from fusion_evidence.lib.parameters import (
    Between,
    ParameterError,
    check_namespace,
    check_values,
    parse_value,
    read_parameters,
    take_profile,
)

CELL = """
count: int = 2
rate: float = 0.5
flag: bool = True
name: str = "x"
tokens: list[int] = [1, 65]
scales: list[float] = [1.0]
limits: dict[str, float] = {"a": 1.0}
limit: int | None = None
candidate: str | None = None
mode: Literal["hot", "cold"] = "hot"
"""


@pytest.fixture
def declared(tmp_path, write_notebook):
    return read_parameters(write_notebook(tmp_path / "n.ipynb", parameters=CELL))


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("count", "8", 8),
        ("count", 8, 8),
        ("rate", "1e-3", 0.001),  # PyYAML reads 1e-3 as text
        ("rate", 2, 2.0),
        ("flag", "false", False),
        ("flag", "True", True),
        ("name", "false", "false"),
        ("name", "12", "12"),
        ("tokens", "[1, 2]", [1, 2]),
        ("tokens", "1,2", [1, 2]),
        ("scales", [1, "1e-3"], [1.0, 0.001]),
        ("limits", '{"a": 2}', {"a": 2.0}),
        ("limit", "none", None),
        ("limit", "3", 3),
        ("candidate", "null", None),
        ("candidate", "mine:op", "mine:op"),
        ("mode", "cold", "cold"),
    ],
)
def test_text_becomes_the_annotated_type(declared, name, given, value):
    result = parse_value(declared[name], given)
    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("count", "eight"),
        ("count", "1e3"),
        ("count", True),
        ("count", 1.0),
        ("rate", "nan"),
        ("rate", float("inf")),
        ("flag", "yes"),
        ("flag", 1),
        ("name", 3),
        ("tokens", "1,x"),
        ("tokens", [1, 2.5]),
        ("limits", "[1]"),
        ("limit", "3.5"),
        ("mode", "warm"),
    ],
)
def test_wrong_type_names_parameter_expected_and_got(declared, name, given):
    with pytest.raises(ParameterError) as caught:
        parse_value(declared[name], given)
    message = str(caught.value)
    assert name in message
    assert declared[name].annotation in message
    assert repr(given) in message


@pytest.mark.parametrize(
    ("cell", "word"),
    [
        ("count = 2", "annotation"),
        ("count: int", "default"),
        ("count: int = 'eight'", "eight"),
        ("count: int = len('x')", "literal"),
        ("count: tuple = (1,)", "tuple"),
    ],
)
def test_parameters_cell_must_be_typed(tmp_path, write_notebook, cell, word):
    path = write_notebook(tmp_path / "n.ipynb", parameters=cell)
    with pytest.raises(ParameterError, match=word):
        read_parameters(path)


def test_namespace_of_a_running_notebook(declared):
    values = {name: parameter.default for name, parameter in declared.items()}
    assert check_namespace(declared, values) == values

    with pytest.raises(ParameterError, match=r"flag.*bool.*'false'"):  # what `papermill -p` passes
        check_namespace(declared, values | {"flag": "false"})
    with pytest.raises(ParameterError, match=r"unknown parameter cuont.*did you mean count"):
        check_namespace(declared, values | {"In": ["", "# Parameters\ncuont = 3\n"]})
    values.pop("count")
    with pytest.raises(ParameterError, match="count has no value"):
        check_namespace(declared, values)


def known() -> dict[str, object]:
    """What the notebooks ask of their values, in small."""
    return dict(
        layers=Between(1),
        tokens=Between(1, 65536),
        scale=Between(0),
        mode=["eager", "compiled"],
        peers={"vllm": 1, "aiter": 2},
    )


GOOD = dict(layers=1, tokens=[1, 65536], scale=0.0, mode="eager", peers=["vllm"], other=-1)


def test_a_profile_fills_what_is_still_a_default(declared):
    values = {name: parameter.default for name, parameter in declared.items()}
    injected = ["", "# Parameters\nrate = 0.5\n"]
    values |= {"count": 7, "In": injected}  # changed in its cell; injected, though the default
    profile = {"count": 3, "rate": 2, "tokens": [1], "limit": "5"}
    assert take_profile(declared, values, profile) == {"tokens": [1], "limit": 5}
    assert (values["count"], values["rate"], values["tokens"]) == (7, 0.5, [1])
    assert take_profile(declared, values, profile) == {}  # its cell runs again
    with pytest.raises(ParameterError, match="cuont"):
        take_profile(declared, values, {"cuont": 1})


def test_good_values_pass():
    check_values(GOOD, **known())
    check_values(GOOD | dict(layers=10**9, scale=44.4, peers=[], mode="compiled"), **known())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(layers=0), "parameter layers: expected at least 1, got 0"),
        (dict(scale=-0.5), "parameter scale: expected at least 0, got -0.5"),
        (dict(tokens=0), "parameter tokens: expected 1 to 65536, got 0"),
        (
            dict(tokens=[1, -3, 65537]),
            "parameter tokens: expected a list of values, each 1 to 65536, got [-3, 65537]",
        ),
        (dict(tokens=[]), "parameter tokens: expected a list of values, each 1 to 65536, got []"),
        (dict(mode="egaer"), "parameter mode: expected one of eager, compiled, got 'egaer'"),
        (
            dict(peers=["vllm", "vlm"]),
            "parameter peers: expected a list of values, each one of vllm, aiter, got ['vlm']",
        ),
        (dict(layers=0, mode="x"), "parameter layers: expected at least 1, got 0"),
    ],
    ids=str,
)
def test_values_that_no_part_can_use_are_named(wrong, message):
    with pytest.raises(ParameterError) as caught:
        check_values(GOOD | wrong, **known())
    assert str(caught.value) == message
