"""Docstrings begin with a verb or a noun."""

import ast

import pytest

from tests.first_words import barred, docstrings, main


@pytest.mark.parametrize("text", ["Of all parameters, that of most first.", "Those of one rank.", "Whether it is.", ""])
def test_a_text_whose_subject_is_in_the_code_is_barred(text):
    assert barred(text)


@pytest.mark.parametrize("text", ["Return whether it is.", "The bytes of a rank.", "Bytes, by owner.", "(B, T) float."])
def test_a_text_with_a_verb_or_a_noun_is_not(text):
    assert not barred(text)


def test_texts_of_attributes_count_and_other_strings_do_not():
    source = '"""A."""\nX = 1\n"""B."""\nprint("C")\n"D"\ndef f():\n    """E."""\n    return "F"\n'
    assert [text for _, text in docstrings(ast.parse(source))] == ["A.", "B.", "E."]


def test_the_lint_names_file_and_line(tmp_path, capsys):
    (tmp_path / "module.py").write_text('"""A module."""\n\n\ndef f():\n    """What is left."""\n')
    assert main([str(tmp_path)]) == 1
    assert f"{tmp_path}/module.py:5: What is left." in capsys.readouterr().err
