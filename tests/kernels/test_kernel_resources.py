"""The table of what kernels take of a GPU: it has every kernel, and the page is that of the table."""

import ast
import csv
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def kernel_resources(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import kernel_resources

    yield kernel_resources
    sys.modules.pop("kernel_resources", None)


def kernels_in_source():
    """Return module and name of each function that Triton compiles and that a launch names."""
    for path in ROOT.glob("src/headwise/**/triton_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel") and node.decorator_list:
                yield path.stem, node.name


def test_every_kernel_has_its_registers_for_each_gpu(kernel_resources):
    with kernel_resources.TABLE.open(newline="") as file:
        counted = {(row["module"], row["kernel"], row["capability"]) for row in csv.DictReader(file)}
    found = set(kernels_in_source())
    assert len(found) > 60
    missing = [(*kernel, gpu) for kernel in found for gpu in ("80", "90", "100") if (*kernel, gpu) not in counted]
    assert not missing, f"{missing}: python benchmarks/kernel_resources.py"


def test_the_page_is_that_of_the_table(kernel_resources, tmp_path, monkeypatch):
    kept = kernel_resources.PAGE.read_text()
    monkeypatch.setattr(kernel_resources, "PAGE", tmp_path / "page.md")
    kernel_resources.write_page()
    assert kernel_resources.PAGE.read_text() == kept


def test_instructions_of_a_loop_are_counted_by_kind(kernel_resources, tmp_path, monkeypatch):
    listing = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/                   LDSM.16.M88.4 R4, [R2] ;
        /*0020*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
        /*0030*/                   MUFU.EX2 R9, R8 ;
        /*0040*/                   IMAD.MOV.U32 R3, RZ, RZ, R2 ;
        /*0050*/              @!P0 FFMA R9, R9, R8, R7 ;
        /*0060*/               @P1 BRA 0x10 ;
        /*0070*/                   EXIT ;
    """

    class Done:
        stdout = listing

    monkeypatch.setattr(kernel_resources.subprocess, "run", lambda *args, **kwargs: Done())
    row = {"file": "x", "tile": [16, 8], "warps": 1}
    found = kernel_resources.of_logits(row, tmp_path, "cuobjdump")
    assert found.pop("all") == 6 * 1000 / 128
    assert found.pop("products") == 0.25
    assert found == dict.fromkeys(found, 1000 / 128)
    assert kernel_resources.of_logits({**row, "tile": [16, None]}, tmp_path, "cuobjdump") == {}
