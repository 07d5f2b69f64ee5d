#!/usr/bin/env bash
# Makes a virtual environment with this project, its locked packages and those of its extras, or does nothing if that is done: install.sh PYTHON VENV [EXTRA,...]
set -euo pipefail

python=$1 venv=$2 extras=${3-}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

fail() {
  echo "megamem: error: $*" >&2
  exit 1
}

command -v "$python" >/dev/null || fail "there is no $python here: install Python 3.11 or 3.12, or name one, as in make PYTHON=/path/to/python3.11"
version=$("$python" -c 'import sys; print(*sys.version_info[:3], sep=".")') || fail "$python does not run"
case $version in
3.11.* | 3.12.*) ;;
*) fail "$python is Python $version, and 3.11 or 3.12 is needed: name one, as in make PYTHON=python3.11" ;;
esac

# Two makes at once take turns. Where flock is missing (macOS), they are on their own.
exec 9<"$root/pyproject.toml"
if command -v flock >/dev/null; then flock 9; fi

# The record says what was installed, and is written last: without it, or with another one, the environment is made anew. Packages of
# a half-finished installation can look complete to pip, so it is never continued.
records=$venv/.megamem
name=${extras:-none}
key=$(cat requirements/lock.txt pyproject.toml setup.py | cksum | tr ' ' '-')-python$version-$(printf %s "$root" | cksum | cut -d' ' -f1)
if [[ -e $records/$name-$key ]] && [[ ! -e $records/unfinished ]] && "$venv/bin/python" -c '' 2>/dev/null; then
  exit 0
fi

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
echo "Installing the packages of requirements/lock.txt${extras:+ with $extras} (a minute or so; more where torch has to be downloaded)."
# By the environment, because an option would not hold for what builds packages.
PIP_CONSTRAINT=requirements/lock.txt "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input -e ".${extras:+[$extras]}"
"$venv/bin/python" -m pip check --disable-pip-version-check >/dev/null || "$venv/bin/python" -m pip check
touch "$records/$name-$key"
rm "$records/unfinished"
