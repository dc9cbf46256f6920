"""The headers of a program are found as a compiler finds them, and all are named."""

from dataclasses import replace
from pathlib import Path

import pytest

from etc_dist.codegen import Source, generate
from etc_dist.errors import BuildError
from etc_dist.ops.matmul_reduce_scatter import matmul_reduce_scatter_graph
from etc_dist.runtime.build import compile_cubin, kernels_folder
from etc_dist.runtime.includes import headers
from etc_dist.schedule import schedule_static

KERNEL = 'extern "C" __global__ void kernel(int* p) { *p = VALUE; }\n'


def source(*paths: Path) -> Source:
    """A program of several files of a user."""
    generated = generate(schedule_static(matmul_reduce_scatter_graph(1)))
    text = "".join(f'#include "{path}"\n' for path in paths)
    return replace(generated, text=text + KERNEL, sources=paths)


def write(folder: Path, **texts: str) -> Path:
    """Files by name, with __ for a slash; returns the first."""
    paths = [folder / f"{name.replace('__', '/')}.cuh" for name in texts]
    for path, text in zip(paths, texts.values(), strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return paths[0]


def included(*paths: Path) -> dict[str, str]:
    texts = headers(source(*paths), kernels_folder())
    compile_cubin(source(*paths).text, texts)
    return texts


def test_a_library_program_has_its_own_headers_only():
    program = generate(schedule_static(matmul_reduce_scatter_graph(2)))
    texts = headers(program, kernels_folder())
    assert {
        "worker/worker.cuh",
        "functions/tile_matmul.cuh",
        "common/types.cuh",
    } <= set(texts)
    assert "functions/attend.cuh" not in texts
    for name, text in texts.items():
        header = (kernels_folder() / name).read_text()
        assert "//" not in text
        assert text.count("\n") == header.count("\n")


def test_headers_next_to_a_file_below_it_and_of_theirs_are_found(tmp_path):
    body = write(
        tmp_path,
        body='#pragma once\n#include "near.cuh"\n#include "sub/deep.cuh"\n',
        near="#pragma once\n#define ONE 1\n",
        sub__deep='#include "deeper.cuh"\n#include "../near.cuh"\n',
        sub__deeper="#define VALUE (ONE + 1)\n",
    )
    texts = included(body)
    names = ["body", "near", "sub/deep", "sub/deeper"]
    assert list(texts) == [f"{tmp_path}/{name}.cuh" for name in names]


@pytest.mark.parametrize(
    "line",
    [
        '#include "near.cuh"',
        "#include <near.cuh>",
        '  #  include  "near.cuh"  // why',
        '# /* a */ include /* b\n */ "near.cuh"',
        '/* a\n   b */ #include "near.cuh"',
        '%:include "near.cuh"',
        '#include \\\n"near.cuh"',
        '#\finclude\v"near.cuh"',
        '#inc\\\nlude "near.cuh"',
        '%\\\n:include/**/"near.cuh"',
        '#include "near.cuh" /* a\n*/ // why',
        "// it's\nconst int a = 1'000; /*'*/ \n#include <near.cuh>",
    ],
)
def test_an_include_is_found_however_it_is_written(tmp_path, line):
    body = write(tmp_path, body=line + "\n", near="#define VALUE 1\n")
    assert list(included(body)) == [str(body), f"{tmp_path}/near.cuh"]


def test_lines_keep_their_numbers(tmp_path):
    text = '/* a\n b */ int a;\n#inc\\\nlude "near.cuh"  // why\nint b = oops;\n'
    body = write(tmp_path, body=text, near="#define VALUE 1\n")
    with pytest.raises(BuildError, match=r"body.cuh\(5\): error: .*oops"):
        included(body)


def test_strings_keep_what_looks_like_a_comment(tmp_path):
    text = """constexpr char a[] = R"(/*x*/
//)" "/*" /* y */ "'//";
static_assert(sizeof(a) == 14);
#define VALUE sizeof(a)
"""
    assert list(included(write(tmp_path, body=text))) == [f"{tmp_path}/body.cuh"]


def test_headers_of_the_library_are_found_from_a_file_of_a_user(tmp_path):
    text = '#include "common/types.cuh"\n#define VALUE sizeof(etc::i32)\n'
    texts = included(write(tmp_path, body=text))
    assert "common/types.cuh" in texts


def test_a_file_is_one_file_however_it_is_named(tmp_path):
    (tmp_path / "x").mkdir()
    write(
        tmp_path,
        body='#pragma once\n#include "near.cuh"\n__device__ int value() { return 1; }\n'
        "#define VALUE value()\n",
        near='#include "body.cuh"\n',
    )
    odd = Path(f"{tmp_path}/x/../body.cuh")
    assert list(included(odd)) == [f"{tmp_path}/near.cuh", str(odd)]


def test_a_text_that_is_not_utf8_is_taken_as_it_is(tmp_path):
    body = write(tmp_path, body="")
    body.write_bytes(b"#define VALUE 1  // 1 \xb5s\n")
    assert list(included(body)) == [str(body)]
