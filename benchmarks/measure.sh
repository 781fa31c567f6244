#!/usr/bin/env bash
# All that is kept of a GPU: the record of the tests there, then the cells that the READMEs show.
#
#   benchmarks/measure.sh FOLDER
#
# FOLDER gets gpu-record.json, tests.log, and of each run of loss-bench a JSON file: cross_entropy, narrow (32768 x 8192),
# softmax, seeds. They are benchmarks/results/NAME-CARD.json (narrow: cross_entropy-8192-CARD.json) and tests/gpu-record.json
# once they have been looked at: torch's own kernels should take what they took before, or else the machine was not ours.
#
# The packages have to be installed, or on PYTHONPATH. Kernels of CuTe DSL can be compiled before, on any machine
# (tests/support/precompile.py). In the environment, all in seconds:
#   TESTS_S=420    for the tests; 0: none.
#   TOTAL_S=900    for everything; runs that have no time are left out.
# And RUNS="cross_entropy narrow softmax seeds", those of loss-bench; WORKERS=14, processes of the tests; TESTS, arguments
# of pytest in place of those below, such as "tests/test_*.py tests/gpu tests/triton --backend triton --backend cutedsl",
# which took an H100's 16 cores 200 s.
set -euo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd)
tests_s=${TESTS_S:-420} total_s=${TOTAL_S:-900}
runs=${RUNS:-cross_entropy narrow softmax seeds}
cd "$(dirname "$0")/.."
read -r -a tests <<< "${TESTS:-tests/test_*.py tests/gpu tests/bench/test_gpu.py tests/triton tests/core tests/cutedsl/test_host.py tests/cutedsl/test_widths.py}"

compared=(--device cuda --backend "torch-nn,torch-compile,triton,cutedsl,quack")
cross_entropy=(cross_entropy --preset foundation "${compared[@]}")
narrow=(cross_entropy --shape 32768x8192 --dtype bf16 "${compared[@]}")
softmax=(softmax log_softmax --shape "4096x128256,32768x2048,8192x32000" --dtype bf16 "${compared[@]}")
seeds=(cross_entropy softmax log_softmax --preset seeds "${compared[@]}")

warm() {
  for run in $runs; do
    declare -n arguments=$run
    python3 -m loss_bench warm "${arguments[@]}" --jobs 3 || true
  done > "$out/warm.log" 2>&1
}

# NAME, seconds that it may take, fewer than which it is left out, further arguments
run() {
  local name=$1 budget=$2 least=$3 left=$((total_s - SECONDS - 8))
  [[ " $runs " == *" $name "* ]] || return 0
  declare -n arguments=$name
  if [ "$left" -lt "$least" ]; then
    echo "no time for $name"
    return
  fi
  budget=$((budget < left ? budget : left))
  # The exit status says whether a result was wrong, which a peer's may be.
  (cd "$out" && python3 -m loss_bench run "${arguments[@]}" "${@:4}" --budget "$budget" --time-limit 40 \
    --json "$name.json") > "$out/$name.log" 2>&1 || true
  echo "$name after $SECONDS s"
}

warm &
if [ "$tests_s" -gt 0 ]; then
  LOSS_GPU_RECORD=$out/gpu-record.json timeout -s INT "$tests_s" python3 -m pytest -q -p no:cacheprovider \
    -n "${WORKERS:-14}" --dist loadgroup --deselect tests/triton/test_compile.py ${tests[@]} \
    > "$out/tests.log" 2>&1 || true
  tail -n 5 "$out/tests.log"
fi
wait
# Tests may use all GPUs; what is measured has one, as most users have.
export CUDA_VISIBLE_DEVICES=0
# The time of the kernels alone, by CUDA graphs, of the seeds only, whose kernels are short.
run cross_entropy 75 40 --pass forward+backward,no-grad --no-graph
run narrow 20 15 --pass forward+backward,no-grad --no-graph
run softmax 60 25 --pass forward,backward --no-graph
run seeds 110 40
