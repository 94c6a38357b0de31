#!/bin/sh
# Prints the path of a Python >= 3.12 that truly runs and can make a virtual environment; says how to get one otherwise.
# $PYTHON, when set, is tried first. A pyenv shim or Debian's python3 without python3-venv is found on the path but does not work: hence the trial.

usable() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

if [ -n "$PYTHON" ] && ! usable "$PYTHON"; then
    echo "PYTHON=$PYTHON is not a usable Python >= 3.12 (it must run, and have the modules venv and ensurepip)" >&2
    exit 1
fi

pyenv_root=$(pyenv root 2>/dev/null || echo "$HOME/.pyenv")
for candidate in "$PYTHON" python3.12 "$pyenv_root"/versions/3.12*/bin/python python3.13 "$pyenv_root"/versions/3.13*/bin/python python3.14 \
    "$pyenv_root"/versions/3.14*/bin/python python3 python; do
    if [ -n "$candidate" ] && usable "$candidate"; then
        "$candidate" -c 'import sys; print(sys.executable)'
        exit 0
    fi
done

if command -v uv >/dev/null 2>&1; then
    found=$(uv python find '>=3.12' 2>/dev/null || (uv python install 3.12 >&2 && uv python find '>=3.12'))
    if [ -n "$found" ] && usable "$found"; then
        echo "$found"
        exit 0
    fi
fi

cat >&2 <<'END'
No usable Python >= 3.12 was found (tried: PYTHON, python3.12 to python3.14, pyenv's versions, uv). Any of these gives one:
    apt-get install python3.12 python3.12-venv      Ubuntu 24.04 and later; Debian: python3 python3-venv
    pyenv install 3.12
    uv python install 3.12
    conda create -n py312 python=3.12               then: make setup PYTHON=<its bin/python>
END
exit 1
