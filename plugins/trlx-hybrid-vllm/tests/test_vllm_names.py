"""What the plugin uses of vLLM outside private/: documented names only, in imports, strings, chains of attributes."""

import ast
import functools
import importlib.util
import inspect
import pkgutil
import re
import socket
import threading
from pathlib import Path

import numpy
import pytest
import torch
import trlx_hybrid
import trlx_hybrid_vllm
from torch.multiprocessing.reductions import StorageWeakRef
from trlx_hybrid_vllm.private import DOCUMENTED

from tests.vllm_patches import PAGE, declared, page

PLUGIN = Path(trlx_hybrid_vllm.__file__).parent
VLLM = Path(importlib.util.find_spec("vllm").origin).parent
PRIVATE = sorted((PLUGIN / "private").glob("*.py"))
OUTSIDE = [file for file in sorted(PLUGIN.rglob("*.py")) if file.parent != PLUGIN / "private"]
TYPES = {path.rpartition(".")[2]: members.split() for path, members in DOCUMENTED.items()}
OF_MEMBERS = {"vllm_config": "VllmConfig", "model_config": "ModelConfig"}
LIBRARIES = (torch, torch.Tensor, torch.nn.Module, torch.distributed, torch.cuda, StorageWeakRef, numpy, dict, list)
LIBRARIES += (str, Path, functools, socket, socket.socket, threading.Timer, Exception)
INSIDE = ("v1/engine", "v1/core", "v1/executor", "v1/worker", "v1/sample", "lora", "distributed", "entrypoints")


def parsed(file):
    return ast.parse(file.read_text())


# --- imports and strings ----------------------------------------------------------------------------------------------


def named(tree):
    """Yield the full names of vLLM that a module imports or has in a string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "vllm")
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "vllm":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"^vllm(?:\.\w+)+$", node.value.replace(":", "."))


@pytest.mark.parametrize("file", OUTSIDE, ids=lambda f: str(f.relative_to(PLUGIN)))
def test_only_documented_names_are_imported(file):
    assert set(named(parsed(file))) <= DOCUMENTED.keys()


def test_each_documented_name_is_in_vllm_and_in_use():
    used = {name for file in OUTSIDE for name in named(parsed(file))}
    handed_over = {"vllm.config.ModelConfig", "vllm.config.ParallelConfig", "vllm.logprobs.Logprob"}
    assert DOCUMENTED.keys() == used | handed_over
    for name in DOCUMENTED:
        assert pkgutil.resolve_name(name) is not None


# --- chains of attributes ---------------------------------------------------------------------------------------------


class Chains(ast.NodeVisitor):
    """Finds members of vLLM's objects that are not on the list: `found` has them as "type.member".

    It knows an object of vLLM by the annotation of a variable, an attribute, or the function that returns it.
    """

    def __init__(self, returns):
        self.returns = returns
        self.known = [{}]
        self.found = []

    def visit_ClassDef(self, node):
        self.known.append({})
        for each in node.body:
            if isinstance(each, ast.AnnAssign):
                self._know(f"self.{ast.unparse(each.target)}", annotated(each.annotation))
        for method in (each for each in node.body if isinstance(each, ast.FunctionDef)):  # what any knows of `self`
            self.known.append({})
            self._learn(method)
            of_self = {name: kind for name, kind in self.known.pop().items() if name.startswith("self.")}
            self.known[-1] |= of_self
        self.generic_visit(node)
        self.known.pop()

    def visit_FunctionDef(self, node):
        self.known.append({})
        self._learn(node)
        self.generic_visit(node)
        self.known.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Attribute(self, node):
        self._used(node.value, node.attr)
        self.generic_visit(node)

    def visit_Call(self, node):
        by_name = isinstance(node.func, ast.Name) and node.func.id in ("getattr", "setattr", "hasattr")
        if by_name and isinstance(node.args[1], ast.Constant):
            self._used(node.args[0], node.args[1].value)
        self.generic_visit(node)

    def _used(self, owner, member):
        kind = self._type(owner)
        if kind is not None and member not in TYPES[kind]:
            self.found.append(f"{kind}.{member}")

    def _know(self, name, kind):
        if kind is not None:
            self.known[-1][name] = kind

    def _learn(self, function):
        for argument in [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]:
            self._know(argument.arg, annotated(argument.annotation))
        for each in ast.walk(function):
            self._assigned(each)

    def _assigned(self, node):
        if isinstance(node, ast.AnnAssign):
            self._know(ast.unparse(node.target), annotated(node.annotation))
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                each = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                pairs = zip(target.elts, node.value.elts, strict=False) if each else [(target, node.value)]
                for name, value in pairs:
                    self._know(ast.unparse(name), self._type(value))

    def _type(self, node):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return self.returns.get(node.func.id, node.func.id if node.func.id in TYPES else None)
        if isinstance(node, ast.Attribute) and self._type(node.value) is not None:
            return OF_MEMBERS.get(node.attr)
        if isinstance(node, ast.Name | ast.Attribute):
            text = ast.unparse(node)
            return next((known[text] for known in reversed(self.known) if text in known), None)
        return None


def annotated(annotation):
    """Return which of vLLM's types an annotation is, or is with None."""
    if isinstance(annotation, ast.BinOp):
        return annotated(annotation.left) or annotated(annotation.right)
    return annotation.id if isinstance(annotation, ast.Name) and annotation.id in TYPES else None


def returned():
    """Return which of vLLM's types each function of private/ returns, by the function's name."""
    functions = [node for file in PRIVATE for node in parsed(file).body if isinstance(node, ast.FunctionDef)]
    return {f.name: kind for f in functions if (kind := annotated(f.returns)) is not None}


def chains(tree):
    visitor = Chains(returned())
    visitor.visit(tree)
    return visitor.found


@pytest.mark.parametrize("file", OUTSIDE, ids=lambda f: str(f.relative_to(PLUGIN)))
def test_only_documented_members_are_used_of_vllm_s_objects(file):
    assert chains(parsed(file)) == []


def test_a_chain_into_an_object_is_found():
    code = """
class A:
    llm: LLM

    def __init__(self, config: VllmConfig | None):
        self._config, own = config, LLM("model")
        own.llm_engine.step()
        self.llm.reset_prefix_cache()

    def run(self):
        getattr(self._config.model_config, "max_model_len", None)
        config_of(self.llm).compilation_config.mode
        self.llm._finalizer
"""
    assert sorted(chains(ast.parse(code))) == [
        "LLM._finalizer",
        "LLM.llm_engine",
        "ModelConfig.max_model_len",
        "VllmConfig.compilation_config",
    ]


# --- names that only the inside of vLLM has ---------------------------------------------------------------------------


def defined(tree):
    """Return the attributes that the classes of a module define: fields, methods, and what is set on `self`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def test_no_name_of_vllm_s_inside_is_reached_for():
    """Catches chains into objects whose type is not written down: `engine.llm.llm_engine.model_executor`."""
    inside = {name for folder in INSIDE for file in (VLLM / folder).rglob("*.py") for name in defined(parsed(file))}
    files = [*OUTSIDE, *PRIVATE, *Path(trlx_hybrid.__file__).parent.rglob("*.py")]
    ours = {name for file in files for name in defined(parsed(file))}
    known = {name for library in LIBRARIES for name in dir(library)} | {m for own in TYPES.values() for m in own}
    known |= {"architectures", "hidden_size", "max_position_embeddings", "sliding_window"}  # of a model's config
    known |= {"r", "timeout"}  # of PEFT's layers, and of torch's options of a broadcast
    assert {"llm_engine", "model_executor", "driver_worker", "engine_core", "lora_manager"} <= inside - ours - known
    for file in OUTSIDE:
        reached = {node.attr for node in ast.walk(parsed(file)) if isinstance(node, ast.Attribute)}
        assert not reached & (inside - ours - known), file


# --- what is replaced -------------------------------------------------------------------------------------------------


def test_the_page_of_what_is_replaced_is_up_to_date():
    assert PAGE.read_text() == page(), "run `python -m tests.vllm_patches`"


@pytest.mark.parametrize("name", sorted({name for _, patch in declared() for name in patch["of"]}))
def test_what_is_replaced_is_there(name):
    owner, _, attribute = name.rpartition(".")
    found = pkgutil.resolve_name(owner)
    assert hasattr(found, attribute) or f"self.{attribute}" in inspect.getsource(found)


def test_all_that_is_replaced_is_declared():
    """Functions of vLLM's to which private/ assigns, and what it gives to `replaced`."""
    files = [file for folder in (*INSIDE, "multimodal/processing") for file in (VLLM / folder).rglob("*.py")]
    nodes = (node for file in files for node in ast.walk(parsed(file)))
    functions = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    for file in PRIVATE:
        names = {name.rpartition(".")[2] for at, patch in declared() if at == file.name for name in patch["of"]}
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "replaced":
                assert not isinstance(node.args[1], ast.Constant) or node.args[1].value in names, ast.unparse(node)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                assert ast.unparse(node.value) == "self" or node.attr not in functions - names, ast.unparse(node)
