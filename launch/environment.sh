# Sourced by launch/test, launch/demo and .ci/run, from the root of the checkout.
#
#   prepare [EXTRA ...]    set PYTHON to an interpreter that can import etc_dist and
#                          the named extras of pyproject.toml
#
# The interpreter is .venv in the checkout, made and filled here; nothing outside of
# the checkout is touched. Where LAUNCH_PYTHON names an interpreter, that one is used
# as it is, and nothing is installed: for machines without a network. A .venv that was
# made by hand is used, too, but never removed.

MADE_HERE=.venv/made-by-launch

say() {
    printf '%s\n' "$*" >&2
}

refuse() {
    say "$@"
    exit 1
}

prepare() {
    if [ -n "${LAUNCH_PYTHON:-}" ]; then
        PYTHON=$(command -v "$LAUNCH_PYTHON") ||
            refuse "LAUNCH_PYTHON=$LAUNCH_PYTHON is not a program"
        "$PYTHON" -c 'import ml_dtypes, mpi4py, numpy' ||
            refuse "$PYTHON lacks the module above: install it, or unset LAUNCH_PYTHON"
        PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
        export PYTHONPATH
    else
        PYTHON=.venv/bin/python
        # Python compiles the modules that it imports, and keeps them: much faster than
        # compiling all that is installed.
        export PIP_NO_COMPILE=1
        unset PYTHONDONTWRITEBYTECODE
        "$PYTHON" -c '' 2>/dev/null || make_venv
        install_missing base "$@" $(gpu_extra)
        PYTHON=$PWD/$PYTHON
    fi
}

make_venv() {
    if [ -e .venv ] || [ -L .venv ]; then
        [ -e "$MADE_HERE" ] || refuse \
            ".venv has no Python that starts, and was not made by this script" \
            "To do: remove or rename $PWD/.venv, or name an interpreter that has all:" \
            "LAUNCH_PYTHON=/path/to/python"
        rm -rf .venv
    fi
    base=$(find_python) || refuse \
        "no Python 3.11 or newer was found in PATH" \
        "(Debian 12, Ubuntu 24.04 and newer have one: sudo apt install python3)"
    say "making .venv with $base"
    mkdir .venv && : >"$MADE_HERE" || refuse "could not make .venv in $PWD"
    if "$base" -c 'import ensurepip' 2>/dev/null; then
        "$base" -m venv .venv || refuse "could not make .venv"
    else
        # Debian keeps pip's installer in another package, python3-venv.
        "$base" -m venv --without-pip .venv && .venv/bin/python launch/get_pip.py || {
            rm -rf .venv
            version=$("$base" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
            refuse "could not get pip. To do: sudo apt install python$version-venv"
        }
    fi
}

find_python() {
    for name in python3 python3.14 python3.13 python3.12 python3.11; do
        "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null &&
            command -v "$name" && return
    done
    return 1
}

# Whether .venv imports etc_dist from this checkout (-I: not from the current folder).
is_editable() {
    "$PYTHON" -I -c 'import importlib.util, os, sys
spec = importlib.util.find_spec("etc_dist")
sys.exit(spec is None or not os.path.samefile(os.path.dirname(spec.origin), "etc_dist"))
' 2>/dev/null
}

# cu12 or cu13, after the driver; nothing on a machine without one.
gpu_extra() {
    version=$(nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9]*\).*/\1/p')
    case $version in
        '') ;;
        1[3-9]) echo cu13 ;;
        12) echo cu12 ;;
        *) say "the NVIDIA driver is too old (CUDA $version): the GPUs stay unused" ;;
    esac
}

# One stamp for each extra, holding the hash of the pyproject.toml it came from. All
# stamps are void where etc_dist is imported from elsewhere: `pip install .` puts a copy
# into .venv, which edits of the checkout do not reach.
install_missing() {
    hash=$("$PYTHON" -c 'import hashlib, pathlib
print(hashlib.sha256(pathlib.Path("pyproject.toml").read_bytes()).hexdigest())')
    is_editable || rm -rf .venv/stamps
    mkdir -p .venv/stamps
    missing=
    for extra in "$@"; do
        [ "$(cat ".venv/stamps/$extra" 2>/dev/null)" = "$hash" ] ||
            missing="$missing,$extra"
    done
    [ -n "$missing" ] || return 0
    say "installing into .venv: etc-dist [${missing#,}]"
    wanted=$(echo "${missing#,}" | sed 's/^base,*//')
    "$PYTHON" -m pip install --quiet --disable-pip-version-check \
        --editable ".${wanted:+[$wanted]}" || refuse \
        "could not install. Without a network, name an interpreter that has all:" \
        "LAUNCH_PYTHON=/path/to/python"
    for extra in $(echo "$missing" | tr ',' ' '); do
        echo "$hash" >".venv/stamps/$extra"
    done
}
