"""An include that is not part of the program's key does not compile."""

from pathlib import Path

import pytest

from etc_dist.errors import BuildError
from tests.runtime.test_includes import included, write


@pytest.mark.parametrize("name", ["../outside.cuh", "OUTSIDE"])
def test_a_header_outside_of_the_folder_is_refused(tmp_path, name):
    write(tmp_path, outside="#define VALUE 1\n")
    name = name.replace("OUTSIDE", f"{tmp_path}/outside.cuh")
    body = write(tmp_path / "own", body=f'\n#include "{name}"\n')
    with pytest.raises(BuildError, match="cannot be part of its program") as caught:
        included(body)
    assert caught.value.where == f"{body}, line 2"
    assert caught.value.got == f'#include "{name}"'
    assert f"a file in {tmp_path}/own or below it" in caught.value.wanted


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("#include NAME", "#include NAME"),
        ('#include_next "near.cuh"', '#include_next "near.cuh"'),
        ("# embed/**/<near.cuh>", "#embed <near.cuh>"),
        ('#if __has_include("/etc/passwd")\n#endif', "__has_include"),
        ("#if C(__has_,include)(<near.cuh>)\n#endif", "__has_"),
        ('#include "/no/file"', '#include "/no/file"'),
        ("#include <a//b>", "#include <a"),
    ],
)
def test_an_include_whose_file_is_not_clear_is_refused(tmp_path, line, reason):
    text = f"#define C(a, b) a##b\n#define VALUE 1\n{line}\n"
    body = write(tmp_path, body=text, near="")
    with pytest.raises(BuildError) as caught:
        included(body)
    assert (caught.value.got, caught.value.where) == (reason, f"{body}, line 3")


@pytest.mark.parametrize(
    "line",
    [
        '#\finclude\v"PATH"',
        '#inc\\\nlude "PATH"',
        '%\\\n:include "PATH"',
        '#include/* a\n*/"PATH"',
        'const char* a = R"(\n#include "PATH"\n)";',
        'const char* a = "/* */ #/* */include "PATH"";',
    ],
)
def test_an_absolute_path_is_refused_however_it_is_written(tmp_path, line):
    write(tmp_path, outside="#define VALUE 1\n")
    line = line.replace("PATH", f"{tmp_path}/outside.cuh")
    with pytest.raises(BuildError, match="cannot be part of its program"):
        included(write(tmp_path / "own", body=f"{line}\n"))


def test_a_line_splice_in_a_raw_string_is_refused(tmp_path):
    body = write(tmp_path, body='#define VALUE 1\nconst char a[] = R"(1\\\n2)";\n')
    with pytest.raises(BuildError, match="raw string has a line splice"):
        included(body)


@pytest.mark.parametrize("name", ['"none.h"', "<mma.h>", "<cstdint>"])
def test_a_header_that_is_not_there_does_not_compile(tmp_path, name):
    body = write(tmp_path, body=f"#include {name}\n#define VALUE 1\n")
    with pytest.raises(BuildError, match="open source file") as caught:
        included(body)
    assert "into the folder of the .cuh or below it" in caught.value.fix


def test_a_header_that_only_another_compiler_needs_may_be_missing(tmp_path):
    text = '#ifndef __CUDACC__\n#include "none.h"\n#endif\n#define VALUE 1\n'
    assert list(included(write(tmp_path, body=text))) == [f"{tmp_path}/body.cuh"]


def test_the_current_folder_is_not_searched(tmp_path, monkeypatch):
    write(tmp_path, near="#define VALUE 1\n")
    monkeypatch.chdir(tmp_path)
    body = write(tmp_path / "own", body='#include "near.cuh"\n')
    with pytest.raises(BuildError, match="open source file"):
        included(body)


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    def unreadable(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    body = write(tmp_path, body="#define VALUE 1\n")
    monkeypatch.setattr(Path, "read_text", unreadable)
    with pytest.raises(BuildError, match="cannot be read") as caught:
        included(body)
    assert caught.value.where == str(body)
