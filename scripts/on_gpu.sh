#!/usr/bin/env bash
# Everything that needs the device, in one go: kernels tested and timed for real, the engine's speed, profiles in every
# number format, engine against twin at four loads. Every stage stands alone: one that fails or runs out of its time is
# reported and the others go on. Results are one folder under 16 MB; a page that sums them up is printed last.
#
#   scripts/on_gpu.sh [--device cuda|cpu] [--quick] [-o FOLDER] [--model NAME] [--only STAGE[,STAGE…]]
#
# --device cpu --quick rehearses every stage on a small model. No network is used.
set -u
cd "$(dirname "$0")/.." || exit 1

DEVICE=cuda QUICK=0 OUT=runs/on_gpu MODEL="" ONLY=""
while (($#)); do
  case $1 in
    --device) DEVICE=${2:?--device needs a value}; shift 2 ;;
    --quick) QUICK=1; shift ;;
    -o | --output) OUT=${2:?-o needs a folder}; shift 2 ;;
    --model) MODEL=${2:?--model needs a name}; shift 2 ;;
    --only) ONLY=${2:?--only needs stages}; shift 2 ;;
    -h | --help) sed -n '2,9p' "$0" | sed 's/^# \{0,1\}//'; exit 0 ;;
    *) echo "error: unknown option $1; --help lists them" >&2; exit 2 ;;
  esac
done
PYTHON=${PYTHON:-}
if [[ -z $PYTHON ]]; then
  if [[ -x .venv/bin/python ]]; then PYTHON=.venv/bin/python; else PYTHON=python3; fi
fi
if ! "$PYTHON" -c 'import torch' 2>/dev/null; then
  echo "error: $PYTHON has no torch; pip install -e '.[engine]'" >&2
  exit 2
fi
if [[ $DEVICE == cuda* ]] && ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "error: PyTorch finds no GPU here; --device cpu --quick rehearses" >&2
  exit 2
fi
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$OUT" || exit 2
: >"$OUT/stages.tsv"

# Stages are sized for about 8 minutes in all on a GPU; each limit leaves some room.
if [[ $DEVICE == cpu ]]; then
  MODEL=${MODEL:-$OUT/model}
  "$PYTHON" scripts/small_model.py --tiny "$OUT/model" || exit 2
  SIZE=(--max-num-seqs 4 --max-num-batched-tokens 64 --max-model-len 128)
  TRAFFIC=(--num-prompts 8 --random-input-len 24 --random-output-len 8 --random-prefix-len 16)
  CROWD=(--requests 4 --prompt-tokens 16 --new-tokens 8)
  BUDGET=3s QUANT_BUDGET=2 LOADS=0.5,0.8
else
  MODEL=${MODEL:-llama-3.1-8b}
  SIZE=(--max-num-seqs 64 --max-num-batched-tokens 2048 --max-model-len 4096)
  TRAFFIC=(--num-prompts 96 --random-input-len 512 --random-output-len 64 --random-prefix-len 128)
  CROWD=(--requests 64 --prompt-tokens 256 --new-tokens 64)
  BUDGET=70s QUANT_BUDGET=45 LOADS=0.3,0.6,0.8,0.9
fi
((QUICK)) && FAST=(--quick) || FAST=()

stage() { # name, seconds, command…: exit 3 of a command means "not there", anything else but 0 a failure
  local name=$1 limit=$2 begun=$SECONDS status
  shift 2
  if [[ -n $ONLY && ,$ONLY, != *,$name,* ]]; then return; fi
  echo "== $name (at most $limit s)"
  timeout --kill-after=10 "$limit" "$@" >"$OUT/$name.log" 2>&1
  status=$?
  local word=ok
  case $status in
    0) ;;
    3) word=absent ;;
    124 | 137) word="out of time" ;;
    *) word="failed ($status)" ;;
  esac
  printf '%s\t%s\t%s\n' "$name" "$word" $((SECONDS - begun)) >>"$OUT/stages.tsv"
  echo "   $word after $((SECONDS - begun)) s"
  [[ $word == ok ]] || tail -n 3 "$OUT/$name.log" | sed 's/^/   | /'
}

TESTS=(tests/realengine/kernels -q -x -p no:cacheprovider)
[[ $DEVICE == cpu ]] && TESTS+=(-k "elementwise and norm") # the rest runs under the interpreter in the test suite
stage kernel_tests 90 "$PYTHON" -m pytest "${TESTS[@]}"
stage kernel_bench 90 "$PYTHON" -m realengine.kernels.bench --device "$DEVICE" "${FAST[@]}" --json "$OUT/kernel_bench.json"
stage engine_speed 75 "$PYTHON" scripts/engine_speed.py --device "$DEVICE" --model "$MODEL" "${SIZE[@]}" \
  --json "$OUT/engine_speed.json"
stage calibrate 120 "$PYTHON" -m tokentwin calibrate --device "$DEVICE" --model "$MODEL" --load-format dummy \
  --budget "$BUDGET" --rounds 1 "${SIZE[@]}" -o "$OUT/profile.json"
stage quantised 90 "$PYTHON" scripts/quant_profile.py --device "$DEVICE" --model "$MODEL" --budget-s "$QUANT_BUDGET" \
  "${SIZE[@]}" --profile "$OUT/profile.json" -o "$OUT/profile-quantised.json"
stage live_int4 60 "$PYTHON" -m tokentwin validate "$OUT/profile-quantised.json" --live --device "$DEVICE" \
  --model "$MODEL" --load-format dummy --quantization int4_wo --kv-cache-dtype int8 --sweep-load 0.7 --no-interleave \
  "${SIZE[@]}" "${TRAFFIC[@]}" -o "$OUT/live-int4"
INTERLEAVE=--no-interleave
[[ $DEVICE == cpu ]] && INTERLEAVE=--interleave
stage live 150 "$PYTHON" -m tokentwin validate "$OUT/profile.json" --live --device "$DEVICE" --model "$MODEL" \
  --load-format dummy --sweep-load "$LOADS" $INTERLEAVE "${SIZE[@]}" "${TRAFFIC[@]}" -o "$OUT/live"
stage transformers 75 "$PYTHON" scripts/against_transformers.py --device "$DEVICE" --model "$MODEL" "${CROWD[@]}" \
  --json "$OUT/against_transformers.json"
stage speculation 60 "$PYTHON" scripts/speculation.py --device "$DEVICE" --model "$MODEL"

"$PYTHON" scripts/on_gpu_summary.py "$OUT" --device "$DEVICE" | tee "$OUT/summary.txt"
! grep -q -E 'failed|out of time' "$OUT/stages.tsv"
