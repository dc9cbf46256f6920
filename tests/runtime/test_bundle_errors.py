"""Bundles that are damaged, or made for something else."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest

from etc_dist.codegen import generate
from etc_dist.errors import ArgumentError
from etc_dist.runtime import bundle as bundles
from etc_dist.runtime.build import ARCH, build
from etc_dist.runtime.bundle import read_bundle, write_bundle
from etc_dist.settings import Settings
from tests.runtime.bundles import make_bundle, plan


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundle")
    return make_bundle(folder / "bundle", Settings(cache=folder / "cache"))


@pytest.fixture
def bundle_copy(bundle, tmp_path):
    """A copy, to be damaged."""
    copy = replace(bundle, folder=tmp_path / "bundle")
    write_bundle(copy)
    return copy


def refused(folder, fix="etc-dist build"):
    with pytest.raises(ArgumentError) as caught:
        read_bundle(folder)
    assert caught.value.what == "a bundle cannot be used"
    assert fix in caught.value.fix
    return caught.value


@pytest.mark.parametrize("name", ["manifest.json", "proofs.json", "*.cubin"])
def test_a_file_that_is_missing_is_named(bundle_copy, name):
    [path] = bundle_copy.folder.glob(name)
    path.unlink()
    assert refused(bundle_copy.folder).where == f"bundle {path}"


@pytest.mark.parametrize("name", ["manifest.json", "proofs.json", "*.cubin"])
def test_a_fifo_in_place_of_a_file_is_refused_by_name(bundle_copy, name):
    [path] = bundle_copy.folder.glob(name)
    path.unlink()
    os.mkfifo(path)
    error = refused(bundle_copy.folder)
    assert error.where == f"bundle {path}" and "not a regular file" in error.got


@pytest.mark.parametrize("name", ["manifest.json", "proofs.json", "*.cubin"])
def test_one_flipped_bit_is_noticed(bundle_copy, name):
    [path] = bundle_copy.folder.glob(name)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert refused(bundle_copy.folder).where == f"bundle {path}"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', "\0", "[" * 9999])
def test_a_manifest_of_another_kind_is_refused(bundle_copy, text):
    (bundle_copy.folder / "manifest.json").write_text(text)
    refused(bundle_copy.folder)


@pytest.mark.parametrize(
    "change", [{"made_by": {"etc_dist": "0"}}, {"files": {}}, {"format": 2}]
)
def test_a_manifest_of_others_is_refused(bundle_copy, change):
    path = bundle_copy.folder / "manifest.json"
    document = {**json.loads(path.read_text()), **change}
    document.pop("digest")
    document["digest"] = bundles.sha256(bundles.canonical(document))
    path.write_text(json.dumps(document))
    error = refused(bundle_copy.folder)
    if "made_by" in change:
        assert "'numpy'" in error.wanted and error.got == "{'etc_dist': '0'}"


@pytest.mark.parametrize("kind", ["proof", "values", "facts"])
def test_a_signed_bundle_with_odd_records_is_refused(bundle, tmp_path, kind):
    [(key, record)], [(name, entry)] = bundle.proofs.items(), bundle.programs.items()
    odd = {
        "proof": {"proofs": {name: record}},
        "values": {"proofs": {key: {**record, "tasks": "4"}}},
        "facts": {"programs": {name: replace(entry, facts={"title": "x"})}},
    }
    write_bundle(replace(bundle, folder=tmp_path, **odd[kind]))
    error = refused(tmp_path)
    assert error.got == f"others: {key if kind == 'values' else name}"


def test_another_configuration_is_named(bundle):
    with pytest.raises(ArgumentError) as caught:
        bundle.expect(ARCH, {"layers": 3})
    assert caught.value.what == "a bundle was built for something else"
    error = caught.value
    assert error.wanted == "layers=3, factors=None"
    assert error.got == "layers=2, factors=[1, 2]"
    with pytest.raises(ArgumentError, match="another GPU\n.*\n.* workers=132\n"):
        bundle.expect_workers(132)


def test_another_gpu_is_named_though_models_have_an_architecture(bundle):
    parameters = {"architecture": "LlamaForCausalLM"}
    model = replace(bundle, parameters=parameters)
    model.expect(ARCH, parameters)
    with pytest.raises(ArgumentError, match="another GPU") as caught:
        model.expect("sm_100a", parameters)
    assert caught.value.wanted == "architecture='sm_100a'"
    assert caught.value.got == f"architecture={ARCH!r}"


@pytest.mark.parametrize("name", ["", "manifest.json", "proofs.json", "*.cubin"])
@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_files_that_other_users_can_write_are_refused(name, mode, bundle_copy):
    [path] = bundle_copy.folder.glob(name) if name else [bundle_copy.folder]
    path.chmod(path.stat().st_mode | mode)
    error = refused(bundle_copy.folder, fix="chmod -R go-w")
    assert error.where == f"bundle {path}" and "mode 0" in error.got
    path.chmod(path.stat().st_mode & ~mode)
    read_bundle(bundle_copy.folder)


def test_files_of_another_user_are_refused(bundle_copy, monkeypatch):
    user = bundle_copy.folder.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    if user == 0:  # root's files are fine
        read_bundle(bundle_copy.folder)
        os.chown(bundle_copy.folder / "proofs.json", 2, -1)
    error = refused(bundle_copy.folder, fix="a copy (cp -r)")
    assert error.got.startswith(f"of user {user or 2}, mode 0")


def test_files_are_for_one_writer_whatever_the_umask(bundle, tmp_path):
    before = os.umask(0)
    try:
        write_bundle(replace(bundle, folder=tmp_path / "bundle"))
    finally:
        os.umask(before)
    read_bundle(tmp_path / "bundle")


def test_a_program_of_other_sources_is_refused(bundle):
    source = generate(plan(), trace=True)
    with pytest.raises(ArgumentError) as caught:
        build(source, Settings(), bundle=bundle)
    assert caught.value.got == "add_row_sum on 1 ranks, static schedule"
    assert caught.value.fix.startswith("unset ETC_DIST_TRACE, or build it again")


@pytest.mark.parametrize("name", ["mine.txt", "manifest.json"])
def test_a_folder_of_other_files_stays_as_it_is(bundle, tmp_path, name):
    text = '{"files": {"mine.txt": 1}}'
    (tmp_path / name).write_text(text)
    with pytest.raises(ArgumentError, match="an empty folder"):
        write_bundle(replace(bundle, folder=tmp_path))
    with pytest.raises(ArgumentError, match="a folder that can be written"):
        write_bundle(replace(bundle, folder=tmp_path / name))
    assert (tmp_path / name).read_text() == text


@pytest.mark.parametrize("change", [{"files": {"mine.txt": 1}}, {"more": 1}])
def test_a_manifest_of_others_removes_nothing(change, bundle, bundle_copy):
    """Signed, with a name that no bundle has; and not signed."""
    path, foreign = (
        bundle_copy.folder / "manifest.json",
        bundle_copy.folder / "mine.txt",
    )
    document = {**json.loads(path.read_text()), **change}
    if "files" in change:
        del document["digest"]
        document["digest"] = bundles.sha256(bundles.canonical(document))
    path.write_text(json.dumps(document))
    foreign.write_text("mine")
    if "files" in change:
        write_bundle(bundle_copy)
    else:
        with pytest.raises(ArgumentError, match="an empty folder"):
            write_bundle(bundle_copy)
        assert path.read_text() == json.dumps(document)
    assert foreign.read_text() == "mine"


def test_a_bundle_takes_the_place_of_an_older_one_alone(bundle_copy, monkeypatch):
    (bundle_copy.folder / "mine.cubin").write_text("mine")
    (cubin,) = bundle_copy.folder.glob(f"{next(iter(bundle_copy.programs))}*")
    with monkeypatch.context() as context:  # an interrupted write can be repeated
        context.setattr("pathlib.Path.write_bytes", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            write_bundle(bundle_copy)
    assert not cubin.exists()
    write_bundle(bundle_copy)
    assert (
        read_bundle(bundle_copy.folder).programs.keys() == bundle_copy.programs.keys()
    )
    assert (bundle_copy.folder / "mine.cubin").read_text() == "mine"
