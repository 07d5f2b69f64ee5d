#!/usr/bin/env bash
# Makes a virtual environment with this project, its locked packages and those of its extras, or does nothing if that is done: install.sh PYTHON VENV ENGINE [EXTRA,...]
set -euo pipefail

python=$1 venv=$2 engine=$3 extras=${4-}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

fail() {
  echo "megamem: error: $*" >&2
  exit 1
}

command -v "$python" >/dev/null || fail "there is no $python here: install Python 3.11 to 3.13, or name one, as in make PYTHON=/path/to/python3.11"
version=$("$python" -c 'import sys; print(*sys.version_info[:3], sep=".")') || fail "$python does not run"
pin=requirements/engine-$engine.txt
[[ -e $pin ]] || fail "there is no engine $engine: choose one of those in requirements/engine-*.txt, as in make ENGINE=0.16"
read -ra pythons < <(sed -n 's/^# Python: //p' "$pin")
if [[ " ${pythons[*]} " != *" ${version%.*} "* ]]; then
  fail "$python is Python $version, and $pin is for ${pythons[*]}: name one, as in make ENGINE=$engine PYTHON=python${pythons[0]}"
fi

# The record says what was installed, and is written last: without it, or with another one, the environment is made anew. Packages of
# a half-finished installation can look complete to pip, so it is never continued.
records=$venv/.megamem
name=${extras:-none}
key=$(cat requirements/lock.txt "$pin" pyproject.toml setup.py lab/pyproject.toml lab/setup.py | cksum | tr ' ' '-')-python$version-$(printf %s "$root" | cksum | cut -d' ' -f1)
is_complete() {
  [[ -e $records/$name-$key ]] && [[ ! -e $records/unfinished ]] && "$venv/bin/python" -c '' 2>/dev/null
}
if is_complete; then exit 0; fi

# Two installations at once take turns. Where flock is missing (macOS), they are on their own.
exec 9<"$root/pyproject.toml"
if command -v flock >/dev/null; then flock 9; fi
if is_complete; then exit 0; fi

if [[ -e $venv ]] && [[ ! -d $records ]]; then
  fail "$venv exists and was not made by this script: move it away, or choose another folder with make VENV=.venv-megamem"
fi
compatible=$(find "$records" -name "*-$key" 2>/dev/null | head -n 1 || true)
rm -rf "$venv-old"
if [[ -z $compatible ]] || [[ -e $records/unfinished ]] || ! "$venv/bin/python" -c '' 2>/dev/null; then
  echo "Making $venv with Python $version."
  # Moved first: a deletion that is cut short must not leave something that looks like an environment.
  if [[ -e $venv ]]; then mv "$venv" "$venv-old" && rm -rf "$venv-old"; fi
  mkdir -p "$records"
  touch "$records/unfinished"
  "$python" -m venv "$venv" || fail "$python -m venv failed (Debian and Ubuntu have it in the package python3-venv)"
fi

touch "$records/unfinished"
echo "Installing the packages of requirements/lock.txt${extras:+ with $extras}, and megatron-core of $pin (a minute or so; more where torch has to be downloaded)."
{ cat "$pin" && grep -v '^megatron-core==' requirements/lock.txt; } >"$records/constraints.txt"
ours=(-e ".${extras:+[$extras]}")
# Makers have the laboratory, too.
if [[ ,$extras, == *,dev,* ]]; then ours+=(-e lab); fi
# By the environment, because an option would not hold for what builds packages.
PIP_CONSTRAINT=$records/constraints.txt "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --no-compile "${ours[@]}"
# On all cores, where pip takes one. Not left to the first imports, which write nothing where PYTHONDONTWRITEBYTECODE is set, as in many
# containers: every start would compile torch anew, and this project. Files that are no Python stay as they are.
"$venv/bin/python" -m compileall -q -j 0 "$venv/lib" kernels megamem parallel pretrain slurm tools lab >/dev/null || true
"$venv/bin/python" -m pip check --disable-pip-version-check >/dev/null || "$venv/bin/python" -m pip check
touch "$records/$name-$key"
rm "$records/unfinished"
