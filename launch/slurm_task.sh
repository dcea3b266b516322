#!/usr/bin/env bash
# One task of a step: slurm_task.sh LOG PYTHON ... -- COMMAND ...
# Task 0 speaks into the job's output; the others into LOG.TASK.log. Requests to stop are ignored for the moment that it
# takes to start hold_signals.py, which holds them back until the command can answer them.
trap '' USR1 TERM HUP
log=$1
shift
python=()
while [ "$1" != -- ]; do
  python+=("$1")
  shift
done
shift
if [ "$SLURM_PROCID" != 0 ]; then exec >>"$log.$SLURM_PROCID.log" 2>&1; fi
command=()
for word in "$@"; do
  # Which node this is only its tasks know: in the batch script $SLURM_NODEID is 0.
  if [ "$word" = NODE_RANK ]; then word=$SLURM_NODEID; fi
  command+=("$word")
done
exec "${python[@]}" -S -E "$DIST_TFM_HOME/launch/hold_signals.py" "${command[@]}"
