#!/bin/sh
# Builds the fused CPU kernel with the address and undefined-behaviour sanitisers and runs its tests on that build.
#
# Nothing of the installation is touched: package and tests are copied to a temporary folder. Working memory of the
# kernel's threads is poisoned between its pieces, so that stepping from one into the next is reported, too.
#
#     scripts/sanitise_kernel.sh [arguments of pytest]
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -r "$root/src" "$root/tests" "$work"
cpu=$work/src/vision_longformer/ops/cpu
rm -f "$cpu"/_fused_cpu*.so

flags="-std=gnu++17 -O1 -g -fPIC -fvisibility=hidden -fno-math-errno -fno-trapping-math -ffp-contract=fast"
flags="$flags -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"
levels=portable
g++ $flags -DVL_LEVEL=portable -c "$cpu/csrc/kernel.cpp" -o "$work/portable.o"
if [ "$(uname -m)" = x86_64 ]; then
    levels="$levels avx2"
    g++ $flags -mavx2 -mfma -DVL_LEVEL=avx2 -c "$cpu/csrc/kernel.cpp" -o "$work/avx2.o"
    g++ $flags -DVL_LEVEL=dispatch -DVL_HAS_AVX2 -c "$cpu/csrc/dispatch.cpp" -o "$work/dispatch.o"
else
    g++ $flags -DVL_LEVEL=dispatch -c "$cpu/csrc/dispatch.cpp" -o "$work/dispatch.o"
fi
g++ -shared -fsanitize=address,undefined "$work"/*.o -o "$cpu/_fused_cpu.so"
echo "built the levels $levels with sanitisers"

cd "$work"
export PYTHONPATH="$work/src:$work/tests" ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
export LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libubsan.so) $(g++ -print-file-name=libstdc++.so)"
"$python" - "$work" <<'END'
import sys
from vision_longformer.ops.cpu import library
assert library.__file__.startswith(sys.argv[1]) and library.load().levels, library.load()
END
"$python" -m pytest -q -p no:cacheprovider -c /dev/null --rootdir "$work" tests/ops/test_cpu_kernel.py -k "not arm" "$@"
