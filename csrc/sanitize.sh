#!/bin/sh
# Runs the tests of all compiled kernels, of attention and of ops, with the kernels under a sanitizer:
#
#   csrc/sanitize.sh address [pytest arguments]      out-of-bounds and use after free
#   csrc/sanitize.sh thread [pytest arguments]       data races
#
# PYTHON (default .venv/bin/python) needs torch, pytest and nanobind. Works on a copy of the package under
# build/, so that an installed extension stays as it is. Interpreter and torch are not instrumented, and
# ThreadSanitizer cannot follow threads that a forked child starts.
set -eu
kind=$1
shift
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
tree=$root/build/sanitize-$kind

cmake -S "$root" -B "$tree/cmake" -G Ninja -DPython_EXECUTABLE="$python" -DOCTAVO_SANITIZE="$kind" >/dev/null
cmake --build "$tree/cmake"
rm -rf "$tree/octavo" "$tree/tests"
cp -r "$root/octavo" "$root/tests" "$root/pyproject.toml" "$tree"
rm -f "$tree"/octavo/attention/_cpu*
cp "$tree"/cmake/_cpu*.so "$tree/octavo/attention"

case $kind in
  address) library=libasan.so ;;
  thread) library=libtsan.so ;;
  *) echo "address or thread, not $kind" >&2; exit 2 ;;
esac
# libstdc++ too: the sanitizer wraps its exceptions, and must find them when it starts.
LD_PRELOAD="$(g++ -print-file-name=$library) $(g++ -print-file-name=libstdc++.so)"
export LD_PRELOAD
# Reports go to files, because pytest captures what the tests print.
rm -f "$tree"/report.*
export ASAN_OPTIONS=detect_leaks=0:halt_on_error=1:log_path="$tree/report"
export TSAN_OPTIONS=ignore_noninstrumented_modules=1:halt_on_error=1:exitcode=66:log_path="$tree/report"
cd "$tree"
# An editable installation finds its own copy of the package first, so its finder is taken out.
start='import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
import octavo.attention.cpu as built  # loads torch before the kernels
assert built._cpu.__file__.startswith("'"$tree"'"), built._cpu.__file__
import pytest
sys.exit(pytest.main(sys.argv[1:]))'
PYTHONPATH="$tree${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONPATH
"$python" -c "$start" -p no:cacheprovider tests/attention/test_cpu_*.py tests/ops \
  --deselect tests/attention/test_cpu_checks.py::test_one_openmp_runtime_is_mapped \
  --deselect tests/ops/test_linear.py::test_a_forked_process_has_threads_of_its_own "$@" || failed=$?
unset LD_PRELOAD
if ls report.* >/dev/null 2>&1; then
  head -n 40 report.*
fi
exit "${failed:-0}"
