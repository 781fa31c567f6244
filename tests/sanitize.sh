#!/usr/bin/env bash
# compute-sanitizer over shares of the tests, each tool in a process of its own: tests/sanitize.sh [SECONDS]
# ONLY=TEXT: of those whose name has the text.
# Racecheck and synccheck see what threads of a block do; for what blocks of a cluster do in one another's memory there is
# the model in tests/cutedsl.
set -euo pipefail
seconds=${1:-300}
cd "$(dirname "$0")/.."
logs=$(mktemp -d)

# NAME, tool, arguments of pytest
check() {
  [[ $1 == *"${ONLY:-}"* ]] || return 0
  LOSS_GPU_RECORD=/dev/null timeout -s INT "$seconds" compute-sanitizer --tool "$2" --report-api-errors no \
    --target-processes all python3 -m pytest -q -x -p no:cacheprovider -p support.share "${@:3}" > "$logs/$1" 2>&1 || true
}

for share in 1/4 2/4 3/4 4/4; do
  check "memcheck of rows that Triton shares, ${share/\// of }" memcheck tests/triton/test_parts.py --share $share &
done
for share in 1/8 3/8 5/8 7/8; do
  check "racecheck of rows that Triton shares, ${share/\// of }" racecheck tests/triton/test_parts.py --share $share &
done
check "memcheck of Triton" memcheck tests/test_softmax.py tests/test_cross_entropy.py --backend triton --share 1/60 &
check "racecheck of Triton" racecheck tests/test_softmax.py tests/test_cross_entropy.py --backend triton --share 2/60 &
for share in 1/8 5/8; do
  check "memcheck of CuTe's schedules, ${share/\// of }" memcheck tests/cutedsl/test_widths.py --share $share &
done
check "racecheck of CuTe's schedules" racecheck tests/cutedsl/test_widths.py --share 3/8 &
check "memcheck of CuTe" memcheck tests/test_softmax.py tests/test_cross_entropy.py --backend cutedsl --share 1/60 &
check "racecheck of CuTe" racecheck tests/test_softmax.py tests/test_cross_entropy.py --backend cutedsl --share 2/60 &
check "synccheck of CuTe" synccheck tests/test_softmax.py tests/test_cross_entropy.py --backend cutedsl --share 3/60 &
wait
for log in "$logs"/*; do
  echo "== ${log##*/}"
  grep -E "SUMMARY|passed|failed" "$log" || tail -n 5 "$log"
done
