# shellcheck shell=bash
# What the batch scripts in slurm/ share; they source it and call one function. docs/slurm.md explains every variable.
#
#   dist_tfm_train --config FILE [--section.key=value ...]   one attempt at a run: preflight, training, verdict, requeue
#   dist_tfm_prepare --config FILE [...]                     shards of a corpus, whole or as an element of a job array
#   dist_tfm_evaluate RUN --source FILE --reference FILE     averaged weights of a run, scored
#
# Settings, by environment (sbatch hands it on) or in slurm/site.sh, which is read first where it exists:
#   DIST_TFM_HOME          the checkout; default: the folder from which sbatch was called
#   DIST_TFM_PYTHON        default: $DIST_TFM_HOME/.venv/bin/python, or python3 in a container
#   DIST_TFM_LAUNCHER      srun (default: one task a rank) or accelerate (one task a node, which starts the node's ranks)
#   DIST_TFM_RANKS_PER_NODE  default: what --ntasks-per-node says
#   DIST_TFM_PREFLIGHT     0 leaves the preflight out
#   DIST_TFM_MAX_RESTARTS  how often a job may be put into the queue again; default 50
#   DIST_TFM_GRACE         seconds that srun may take to end after a rank has failed; default 60
#   DIST_TFM_STAGE_FROM    shards on a shared file system, copied to data.shards (a path local to each node) beforehand
#   DIST_TFM_APPTAINER     an image file: Python runs in `apptainer exec`, with DIST_TFM_APPTAINER_OPTIONS (--nv ...)
#   DIST_TFM_PYXIS         an image: srun runs everything with --container-image, and DIST_TFM_PYXIS_MOUNTS
#   DIST_TFM_NODES         MIN-MAX, as --nodes has them: a job that is queued again takes any number between them
#   DIST_TFM_AVERAGE       how many of the last weights are averaged before they are scored; default all kept, 0: none
#   DIST_TFM_TASKS         number of elements that a preparation is divided into, if not all of the array is submitted

set -uo pipefail # not -e: exit codes are looked at where they arise

dist_tfm_say() { printf '%s %s\n' "$(date '+%F %T')" "$*"; }

# What cannot be meant is said before anything is started.
dist_tfm_check() {
  local name number='^[0-9]+$' nodes='^[0-9]+(-[0-9]+)?$'
  if [ -z "${SLURM_JOB_ID:-}" ]; then
    dist_tfm_say "error: this is no Slurm job: hand the script to sbatch" >&2
    exit 2
  fi
  for name in DIST_TFM_RANKS_PER_NODE DIST_TFM_MAX_RESTARTS DIST_TFM_GRACE DIST_TFM_AVERAGE DIST_TFM_TASKS; do
    if [ -n "${!name:-}" ] && ! [[ ${!name} =~ $number ]]; then
      dist_tfm_say "error: $name: expected a number, found '${!name}'" >&2
      exit 2
    fi
  done
  if ! [[ ${DIST_TFM_LAUNCHER:-srun} =~ ^(srun|accelerate)$ ]]; then
    dist_tfm_say "error: DIST_TFM_LAUNCHER: expected srun or accelerate, found '$DIST_TFM_LAUNCHER'" >&2
    exit 2
  fi
  if [ -n "${DIST_TFM_NODES:-}" ] && ! [[ $DIST_TFM_NODES =~ $nodes ]]; then
    dist_tfm_say "error: DIST_TFM_NODES: expected MIN-MAX as --nodes has them, found '$DIST_TFM_NODES'" >&2
    exit 2
  fi
  for name in train valid; do
    if [ -n "${DIST_TFM_STAGE_FROM:-}" ] && [ ! -f "$DIST_TFM_STAGE_FROM/$name/index.json" ]; then
      dist_tfm_say "error: DIST_TFM_STAGE_FROM: expected prepared shards, a folder with $name/index.json, found" \
        "'$DIST_TFM_STAGE_FROM'" >&2
      exit 2
    fi
  done
}

# Sets what every script needs: python (an array: how to run Python on this node), options of srun, variables.
dist_tfm_setup() {
  # shellcheck source=/dev/null
  if [ -r "$DIST_TFM_HOME/slurm/site.sh" ]; then . "$DIST_TFM_HOME/slurm/site.sh"; fi
  dist_tfm_check
  export DIST_TFM_HOME PYTHONPATH="$DIST_TFM_HOME${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
  # Libraries other than torch; train.py sets torch's threads from the cores of its task.
  export OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"
  dist_tfm_restarts=${SLURM_RESTART_COUNT:-0}
  dist_tfm_nodes=${SLURM_JOB_NUM_NODES:-${SLURM_NNODES:-1}}
  dist_tfm_per_node=${SLURM_NTASKS_PER_NODE:-$((${SLURM_NTASKS:-$dist_tfm_nodes} / dist_tfm_nodes))}
  dist_tfm_per_node=${DIST_TFM_RANKS_PER_NODE:-$dist_tfm_per_node}
  # --export: a job submitted with --export=NAME would hand its tasks nothing else, not even where they meet.
  dist_tfm_srun=(srun --nodes="$dist_tfm_nodes" --export=ALL --kill-on-bad-exit=1)
  local inside=
  dist_tfm_inside=()
  if [ -n "${DIST_TFM_APPTAINER:-}" ]; then
    dist_tfm_inside=(apptainer exec --bind "$PWD" --bind "$DIST_TFM_HOME")
    # shellcheck disable=SC2206 # options are words
    dist_tfm_inside+=(${DIST_TFM_APPTAINER_OPTIONS:-} "$DIST_TFM_APPTAINER")
    inside=1
  fi
  if [ -n "${DIST_TFM_PYXIS:-}" ]; then
    dist_tfm_srun+=(--container-image="$DIST_TFM_PYXIS" --container-workdir="$PWD"
      --container-mounts="$PWD,$DIST_TFM_HOME${DIST_TFM_PYXIS_MOUNTS:+,$DIST_TFM_PYXIS_MOUNTS}")
    inside=1
  fi
  local default=$DIST_TFM_HOME/.venv/bin/python
  if [ -n "$inside" ] || [ ! -x "$default" ]; then default=python3; fi
  dist_tfm_interpreter=${DIST_TFM_PYTHON:-$default}
  dist_tfm_python=("${dist_tfm_inside[@]}" "$dist_tfm_interpreter")
  # Python on this node alone; under pyxis only srun enters the container.
  dist_tfm_here=("${dist_tfm_python[@]}")
  if [ -n "${DIST_TFM_PYXIS:-}" ]; then
    dist_tfm_here=("${dist_tfm_srun[@]}" --nodes=1 --ntasks=1 --overlap "${dist_tfm_python[@]}")
  fi
}

# MASTER_ADDR and MASTER_PORT: the first node, where this script runs, and a port below the ephemeral range (from 32768)
# that belongs to this job and attempt; the next of a fixed sequence if somebody listens there.
dist_tfm_meet() {
  local head address port tries
  head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
  address=$(scontrol --oneliner show node "$head" 2>/dev/null | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
  port=$((20000 + (SLURM_JOB_ID * 8 + dist_tfm_restarts % 8) % 12000))
  for ((tries = 0; tries < 20; tries++)); do
    (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || break
    port=$((20000 + (port - 20000 + 997) % 12000))
  done
  export MASTER_ADDR=${address:-$head} MASTER_PORT=$port
}

# The numbered steps of this job that are running now (not the batch script, not `extern`).
dist_tfm_steps() {
  squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format=%i 2>/dev/null | grep -E '\.[0-9]+$'
}

dist_tfm_forward() {
  local steps
  mapfile -t steps < <(dist_tfm_steps)
  if [ "${#steps[@]}" -gt 0 ]; then scancel --signal=USR1 "${steps[@]}" 2>/dev/null; fi
}

# A request to stop (USR1 before the time limit, TERM) goes on to all ranks, and again every 10 seconds until the step has
# ended: it may arrive before there is a step, and before a rank's shell has begun to hold signals back.
dist_tfm_on_signal() {
  dist_tfm_interrupted=1
  dist_tfm_say "batch script got $1: all ranks are asked to stop after a checkpoint"
  if [ -z "$dist_tfm_signalled" ]; then
    dist_tfm_signalled=$1
    (
      trap - USR1 TERM
      while kill -0 $$; do # $$ is the script: this does not outlive it
        dist_tfm_forward
        sleep 10
      done
    ) 2>/dev/null &
    dist_tfm_forwarder=$!
  fi
}

# Runs a command to its end, whatever signals come meanwhile; sets dist_tfm_code.
dist_tfm_run() {
  local pid code
  "$@" </dev/null &
  pid=$!
  dist_tfm_watch "$pid" &
  dist_tfm_watcher=$!
  dist_tfm_code=127
  while :; do
    dist_tfm_interrupted=''
    wait "$pid" # a trapped signal cuts it short
    code=$?
    if [ "$code" = 127 ]; then break; fi # the signal came after the end: the code that was got before holds
    dist_tfm_code=$code
    if [ -z "$dist_tfm_interrupted" ]; then break; fi
  done
  kill "$dist_tfm_watcher" 2>/dev/null
}

# Once a rank has left an error the step has no future; but srun waits for the tasks of a node that has died until Slurm
# notices (SlurmdTimeout), and would then queue the job again itself. So it is given DIST_TFM_GRACE seconds: more than
# Slurm's KillWait, in which the other ranks are ended. dist_tfm_watch PID: of srun.
dist_tfm_watch() {
  trap - USR1 TERM
  while kill -0 "$1" 2>/dev/null; do
    if dist_tfm_has_failed; then
      sleep "${DIST_TFM_GRACE:-60}"
      if kill -KILL "$1" 2>/dev/null; then dist_tfm_say "srun did not end after a rank had failed: it is ended"; fi
      return
    fi
    sleep 2
  done
}

# Whether a rank has left an error.
dist_tfm_has_failed() {
  local record
  for record in "$DIST_TFM_ATTEMPT".[0-9]*; do
    if [ -e "$record" ]; then return 0; fi
  done
  return 1
}

# Runs a command as every rank, under a name for the logs: dist_tfm_ranks NAME COMMAND ...
dist_tfm_ranks() {
  local name=$1
  shift
  local tasks=("--ntasks=$((dist_tfm_nodes * dist_tfm_per_node))" "--ntasks-per-node=$dist_tfm_per_node")
  local cores=${SLURM_CPUS_PER_TASK:-}
  if [ "${DIST_TFM_LAUNCHER:-srun}" = accelerate ]; then
    tasks=("--ntasks=$dist_tfm_nodes" --ntasks-per-node=1)
    cores=${cores:+$((cores * dist_tfm_per_node))}
    set -- "$dist_tfm_interpreter" -m accelerate.commands.launch \
      --config_file "$DIST_TFM_HOME/launch/accelerate/multi_node.yaml" --num_machines "$dist_tfm_nodes" \
      --num_processes "$((dist_tfm_nodes * dist_tfm_per_node))" --machine_rank NODE_RANK \
      --main_process_ip "$MASTER_ADDR" --main_process_port "$MASTER_PORT" "$@"
  else
    set -- "$dist_tfm_interpreter" "$@"
  fi
  dist_tfm_run "${dist_tfm_srun[@]}" "${tasks[@]}" ${cores:+--cpus-per-task="$cores"} --job-name="$name" \
    bash "$DIST_TFM_HOME/launch/slurm_task.sh" "$dist_tfm_run_dir/logs/$dist_tfm_attempt.$name" \
    "${dist_tfm_python[@]}" -- "$@"
}

# Whether every node of the job still starts a process.
dist_tfm_nodes_answer() {
  timeout 60 srun --nodes="$dist_tfm_nodes" --ntasks="$dist_tfm_nodes" --ntasks-per-node=1 --overlap true \
    </dev/null >/dev/null 2>&1
}

# Copies shards to a path that is local to each node, once.
dist_tfm_stage() {
  dist_tfm_say "staging $DIST_TFM_STAGE_FROM to $dist_tfm_shards on each of $dist_tfm_nodes node(s)"
  dist_tfm_run srun --nodes="$dist_tfm_nodes" --ntasks="$dist_tfm_nodes" --ntasks-per-node=1 --kill-on-bad-exit=1 \
    bash "$DIST_TFM_HOME/launch/slurm_stage.sh" "$DIST_TFM_STAGE_FROM" "$dist_tfm_shards"
}

# One attempt at a run; ends the script with its exit code, or by putting the job into the queue again.
dist_tfm_train() {
  dist_tfm_signalled='' dist_tfm_forwarder='' dist_tfm_code=0
  trap 'dist_tfm_on_signal USR1' USR1
  trap 'dist_tfm_on_signal TERM' TERM
  dist_tfm_setup
  export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}" NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
  dist_tfm_attempt=$SLURM_JOB_ID.$dist_tfm_restarts
  local begun
  begun=$("${dist_tfm_here[@]}" -m launch.attempt begin --name "$dist_tfm_attempt" "$@") || exit $?
  local lines
  mapfile -t lines <<<"$begun"
  if [ "${#lines[@]}" != 3 ]; then # --help or --print-config was asked for, and this is it
    printf '%s\n' "$begun"
    exit 0
  fi
  dist_tfm_run_dir=${lines[0]} DIST_TFM_ATTEMPT=${lines[1]} dist_tfm_shards=${lines[2]}
  export DIST_TFM_ATTEMPT
  case "$dist_tfm_shards" in
    hf://*) unset HF_HUB_OFFLINE ;; # the hub is where the shards are
  esac
  case "${DIST_TFM_STAGE_FROM:+staged} $dist_tfm_shards" in
    staged*://*)
      dist_tfm_say "error: DIST_TFM_STAGE_FROM copies shards into a folder, but data.shards=$dist_tfm_shards is a URL," \
        "whose blocks are cached on each node (data.cache): unset one of them" >&2
      exit 2
      ;;
  esac
  dist_tfm_meet
  dist_tfm_say "job $SLURM_JOB_ID attempt $dist_tfm_restarts: $dist_tfm_nodes node(s) x $dist_tfm_per_node rank(s)" \
    "($SLURM_JOB_NODELIST), meeting at $MASTER_ADDR:$MASTER_PORT, run directory $dist_tfm_run_dir"

  if [ -n "${DIST_TFM_STAGE_FROM:-}" ] && dist_tfm_goes_on; then
    dist_tfm_stage
    if [ "$dist_tfm_code" = 2 ]; then exit 2; fi # a node has said why: trying again would change nothing
  fi
  if [ "${DIST_TFM_PREFLIGHT:-1}" != 0 ] && dist_tfm_goes_on; then
    dist_tfm_ranks preflight "$DIST_TFM_HOME/launch/preflight.py" "$@"
  fi
  if dist_tfm_goes_on; then dist_tfm_ranks train "$DIST_TFM_HOME/dist_tfm/train.py" "$@"; fi
  dist_tfm_finish
}

# Whether nothing has failed so far and nobody has asked to stop.
dist_tfm_goes_on() {
  [ "$dist_tfm_code" = 0 ] && [ -z "$dist_tfm_signalled" ] && [ ! -e "$DIST_TFM_ATTEMPT.stopped" ]
}

# What becomes of the job: launch/attempt.py judges, by the marker DONE, progress, signals and the ranks' errors.
dist_tfm_finish() {
  # From here on it is decided; TERM is how Slurm ends a script whose job it puts into the queue.
  trap '' USR1
  trap - TERM
  if [ -n "$dist_tfm_forwarder" ]; then kill "$dist_tfm_forwarder" 2>/dev/null; fi
  local options=(--run "$dist_tfm_run_dir" --exit-code "$dist_tfm_code" --restarts "$dist_tfm_restarts")
  options+=(--most-restarts "${DIST_TFM_MAX_RESTARTS:-50}")
  if [ -n "$dist_tfm_signalled" ]; then
    options+=(--signalled)
  elif [ "$dist_tfm_code" != 0 ] && ! dist_tfm_nodes_answer; then
    options+=(--node-lost)
  fi
  "${dist_tfm_here[@]}" -m launch.attempt end --name "$dist_tfm_attempt" "${options[@]}"
  local verdict=$?
  if [ "$verdict" != 75 ]; then exit "$verdict"; fi
  # A job that somebody has cancelled, or that Slurm itself puts into the queue, is not ours to put there.
  local state
  state=$(scontrol --oneliner show job "$SLURM_JOB_ID" 2>/dev/null | sed -n 's/.* JobState=\([^ ]*\).*/\1/p')
  if [ "$state" != RUNNING ]; then
    dist_tfm_say "job is $state: it is not queued again from here"
    exit 1
  fi
  dist_tfm_say "job $SLURM_JOB_ID is queued again"
  trap '' TERM # by which Slurm ends this script now: a moment is still needed
  if ! scontrol requeue "$SLURM_JOB_ID"; then
    dist_tfm_say "Slurm did not queue it again (is --requeue allowed here?): the same sbatch command goes on from here"
    exit 1
  fi
  if [ -n "${DIST_TFM_NODES:-}" ]; then
    # Slurm keeps the number of tasks of the nodes that the job had, and would wait for as many.
    scontrol update JobId="$SLURM_JOB_ID" NumNodes="$DIST_TFM_NODES" \
      NumTasks="$((${DIST_TFM_NODES%-*} * ${SLURM_NTASKS_PER_NODE:-1}))"
  fi
  trap - TERM
  sleep 300 # Slurm ends this script
  exit 1
}

# Shards of a corpus: whole, or --stage ..., or, in a job array, the element's share.
dist_tfm_prepare() {
  dist_tfm_setup
  local task=()
  if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
    local all=${DIST_TFM_TASKS:-$SLURM_ARRAY_TASK_COUNT}
    if [ -z "${DIST_TFM_TASKS:-}" ] && [ "$((SLURM_ARRAY_TASK_MAX + 1))" != "$SLURM_ARRAY_TASK_COUNT" ]; then
      dist_tfm_say "error: expected --array=0-N, or DIST_TFM_TASKS to say how many elements there are in all, found" \
        "elements up to $SLURM_ARRAY_TASK_MAX of which $SLURM_ARRAY_TASK_COUNT are submitted" >&2
      exit 2
    fi
    task=(--task "$SLURM_ARRAY_TASK_ID/$all")
  fi
  dist_tfm_say "preparing on $(hostname), ${SLURM_CPUS_PER_TASK:-1} core(s): $* ${task[*]}"
  exec "${dist_tfm_here[@]}" "$DIST_TFM_HOME/data_pipeline/prepare.py" "$@" "${task[@]}"
}

# Averages the last weights of a run (DIST_TFM_AVERAGE of them), then scores them: dist_tfm_evaluate RUN OPTIONS ...
dist_tfm_evaluate() {
  dist_tfm_setup
  if [ $# -lt 1 ]; then
    dist_tfm_say "error: expected a run directory, then the options of evaluate.py" >&2
    exit 2
  fi
  local weights=$1
  shift
  if [ "${DIST_TFM_AVERAGE:-}" != 0 ]; then
    "${dist_tfm_here[@]}" "$DIST_TFM_HOME/dist_tfm/average.py" "$weights" \
      ${DIST_TFM_AVERAGE:+--last "$DIST_TFM_AVERAGE"} || exit $?
    weights=$weights/averaged
  fi
  exec "${dist_tfm_here[@]}" "$DIST_TFM_HOME/dist_tfm/evaluate.py" --checkpoint "$weights" "$@"
}
