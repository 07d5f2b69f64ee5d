#!/bin/bash
# mine on 64 x 8 ranks, cluster example-h100. Written by `megamem submit`, and anew by the next one.
#SBATCH --job-name=mine
#SBATCH --partition=gpu
#SBATCH --account=research
#SBATCH --gpus-per-node=8
#SBATCH --mem=0
#SBATCH --nodes=64
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=2-00:00:00
#SBATCH --output=/shared/research/runs/mine/slurm/job_%j.log
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@900
#SBATCH --export=NIL
#SBATCH --chdir=/shared/research/runs/mine/slurm/code/0123456789ab
#SBATCH --requeue
#SBATCH --exclusive
#SBATCH --switches=1@12:00:00

set -u
records=/shared/research/runs/mine/slurm
export SLURM_EXPORT_ENV=ALL  # steps get what this script sets

# The time limit, or preemption: the ranks finish their step, save, and end.
asked='' ranks=none timer=''
stop() {
  asked=--asked-to-stop
  [[ $ranks == none ]] || kill -USR1 "$ranks" 2>/dev/null
}
trap stop USR1 TERM

# What the ranks' libraries read when they start.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-12}"  # cores of a rank, if modules say no other
unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT  # ranks follow from Slurm's variables
export TRITON_CACHE_DIR=/scratch"/megamem-$UID/triton"  # on the node's disk: ranks would meet in one folder of the home directory
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True  # tables are few and large: fixed segments would fragment
export NCCL_IB_HCA=mlx5  # the InfiniBand adapters, and not the Ethernet ones that NCCL would also count
export NCCL_SOCKET_IFNAME=bond0  # the network on which ranks meet; without it NCCL takes the first that is up, which differs between nodes
export GLOO_SOCKET_IFNAME=bond0  # as NCCL_SOCKET_IFNAME
export NCCL_DEBUG=WARN  # says which connection failed, and nothing when all is well

python=(python3)
in_container=(--container-image=/shared/research/images/megamem.sqsh '--container-mounts=/shared/research:/shared/research,/scratch:/scratch' --container-workdir="$PWD")
once=(srun --overlap --nodes=1 --ntasks=1 "${in_container[@]}" "${python[@]}")

# One lost answer of the controller must not lose the run. While it is away nobody else can have these nodes either, so it
# is waited for; what it refuses for five minutes is given up. What it says is left in `answer`.
insist() {
  local tries=0
  until answer=$("$@" 2>&1); do
    answer="$(date -u +%FT%TZ) $*: $answer"
    echo "$answer" >&2
    tries=$((tries + 1))
    scontrol ping 2>/dev/null | grep -q 'is UP' || tries=0
    ((tries < 20)) || return 1
    sleep 15
  done
  answer=$(tail -n 1 <<<"$answer")
}
give_up() {
  echo "$answer" >"$attempt/refused.txt"
  exit "$((code == 0 ? 1 : code))"
}
# The run's own disk may be full: then Slurm's record of the job is the place for the reason.
say_in_slurm() {
  local said=${2##*$'\n'}
  insist scontrol update JobId="$SLURM_JOB_ID" Comment="${said:-no word of what follows}"
  exit "$1"
}

# Those that answer: the controller takes minutes to notice that one has died.
live_nodes() {
  local node
  for node in $(scontrol show hostnames "$(squeue -h -j "$SLURM_JOB_ID" -o %N)"); do
    { timeout 60 srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" true 2>/dev/null && echo "$node"; } &
  done | sort -V | paste -sd,
}

nodes_of_job() { scontrol show hostnames | paste -sd,; }

# An attempt of its own, or the reason why there must be none.
insist squeue -h -j "$SLURM_JOB_ID" -o %L || answer=''
plan=$("${once[@]}" -m tools.job begin "$records" --nodes "$(nodes_of_job)" --time-left "$answer") || say_in_slurm $? "$plan"
[[ -n $plan ]] || exit 0
read -r number nodes stop_after_s _ <<<"$plan"
attempt=$records/attempts/$number
if [[ $stop_after_s != never ]]; then
  # Saves were measured to take longer than Slurm's signal leaves.
  (sleep "$stop_after_s" && kill -USR1 $$) &
  timer=$!
fi

if [[ -z $asked ]]; then
  srun --nodes="$nodes" --ntasks="$((nodes * 8))" --ntasks-per-node=8 --cpus-per-task=12 \
    --cpu-bind=cores --kill-on-bad-exit=1 --wait=60 --output="$attempt/rank_%t.log" \
    --gpus-per-node=8 \
    "${in_container[@]}" "${python[@]}" -m tools.job rank "$records" "$attempt" 2>"$attempt/srun.log" &
  ranks=$!
fi

# Of ranks that never started.
code=75
if [[ $ranks != none ]]; then
  [[ -z $asked ]] || stop
  # A signal ends `wait`, not the ranks.
  wait "$ranks"
  while kill -0 "$ranks" 2>/dev/null; do wait "$ranks"; done
  wait "$ranks"
  code=$?
  ranks=none
  cat "$attempt/srun.log" >&2
fi
[[ -z $timer ]] || { kill "$timer" && wait "$timer"; } 2>/dev/null

# Its state now, why, how often Slurm has requeued it, and how long it may go on; and, after a failure, its nodes.
insist squeue -h -j "$SLURM_JOB_ID" -O State:40,Reason:60,RestartCnt:20,TimeLeft:20 || answer=''
verdict=$("${once[@]}" -m tools.job end "$records" "$attempt" --exit-code "$code" $asked \
  --standing "$answer" --nodes "$([[ -n $asked || $code == 0 ]] || live_nodes)") || say_in_slurm $? "$verdict"
read -r action delay_s exclude next <<<"$verdict"
case $action in
  done) exit 0 ;;
  again) exec bash "$records/job.sh" ;;
  requeue) insist scontrol requeue "$SLURM_JOB_ID" || give_up ;;
  resubmit)
    # Slurm changes neither start nor nodes of a job that runs.
    [[ $exclude != none ]] || exclude=''
    insist sbatch --parsable --begin="now+$delay_s" ${exclude:+--exclude="$exclude"} "$records/job.sh" || give_up
    job=${answer%%;*}
    "${once[@]}" -m tools.job queued "$records" "$job"
    # The next stage's job waits for the success of this one, which from now on is that one's.
    [[ $next == none ]] || insist scontrol update JobId="$next" Dependency="afterok:$job" || give_up ;;
  *) exit "$((code == 0 ? 1 : code))" ;;
esac
