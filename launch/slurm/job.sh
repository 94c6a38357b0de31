# What the .sbatch files of this folder share; they source it. bash.
#
#   run_job launch/train_grpo.py --config yaml/x.yaml section.key=value
#
# starts one task a GPU with srun, writes a log a node, and puts the job back into the queue when its time is nearly over: Slurm sends
# USR1 to this script (#SBATCH --signal=B:USR1@SECONDS), the run saves at the end of its step and leaves with code 75, and the requeued job
# goes on from that checkpoint. A run that fails is not requeued, not even then; the job has its exit code (docs/running.md).

PYTHON=${PYTHON:-.venv/bin/python}
STOPPED=75 # saved, resumable
KILLED=128 # and above: by a signal, before it could listen
export PYTHONUNBUFFERED=1

cd "${SLURM_SUBMIT_DIR:?sbatch sets it}" || exit 2
# Since Slurm 22.05 srun does not take the CPUs of a task from its job: each rank, its engine and its rewards would share one core.
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
LOGS=${LOGS:-slurm-logs/$SLURM_JOB_ID}
mkdir -p "$LOGS"
steps=0       # of this job so far; Slurm counts them from 0
near_end=no

say() { echo "[$(date '+%F %T')] $*"; }

# Every node must see the same tree, interpreter, packages, driver and GPUs: a difference shows up here and not as a hang an hour later.
check_nodes() {
    local found
    found=$(srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 "$PYTHON" tools/doctor.py --brief) || {
        say "the check of the nodes failed: $found"
        exit 3
    }
    steps=$((steps + 1))
    if [ "$(cut -d' ' -f2- <<<"$found" | sort -u | wc -l)" != 1 ]; then
        say "the nodes differ:"
        sort <<<"$found"
        exit 3
    fi
    say "nodes: $(cut -d' ' -f1 <<<"$found" | sort | tr '\n' ' ')- $(head -n 1 <<<"$found" | cut -d' ' -f2-)"
}

# The step may hold for a while: the run finishes its RL step and saves. --signal's seconds must cover that.
ask_to_stop() {
    near_end=yes
    say "the time limit is near: asking the run to save and stop"
    scancel --signal=TERM "$SLURM_JOB_ID.$steps" || true # nothing runs yet
}

requeue() {
    say "back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
    exit "$1"
}

run_job() {
    local pid code
    trap ask_to_stop USR1 # first: without it the signal would end this script, and the job with it
    check_nodes
    [ "$near_end" = no ] || requeue "$STOPPED" # too late to begin
    srun --output="$LOGS/%N.log" --open-mode=append --wait=60 "$PYTHON" "$@" &
    pid=$!
    while kill -0 "$pid" 2>/dev/null; do # a signal ends `wait` early
        wait "$pid"
    done
    wait "$pid" # bash keeps the status of a child that has ended
    code=$?
    say "the run ended with code $code; logs: $LOGS"
    if [ "$near_end" = yes ] && { [ "$code" = "$STOPPED" ] || [ "$code" -ge "$KILLED" ]; }; then
        requeue "$code"
    fi
    exit "$code"
}
