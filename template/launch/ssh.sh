#!/usr/bin/env bash
# Train on all nodes of a host list over ssh, from any machine that reaches them:
#   launch/ssh.sh hosts.txt --config configs/image_classification.yaml --batches.micro_batch_size 4
# hosts.txt has one node per line, main node first, with its number of processes: gpu-a slots=8
# Put --preflight after hosts.txt to check the cluster before training.
#
# Every node must have this folder and this Python under the same paths, and accept ssh without a
# password. Each line of output begins with its host. Ctrl-C, or the first node that fails, stops
# all nodes: each node has a connection to this script, and saves and exits when the connection ends
# for any reason.
# Exit codes: 0 finished; 75 preempted; 2 if a node had an error that a retry would repeat;
# otherwise the exit code of the first node that failed. If the run goes on without a node
# (MIN_MACHINES), the exit code of node 0.
#
# Environment variables: WHERE, a name in accelerate_configs/ (default multi_node); PORT of the main
# node (29500); ADDRESS of the main node, if it is not its name in the list; SSH, the command (ssh).
# With MIN_MACHINES=3 the run continues while three or more nodes are up. If a node other than the
# first can no longer be reached, or its launcher ends with a code other than 0, 2 and 75, this
# script tries to start it again every 10 s, and the node joins when it is back.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if ! python=$(command -v python); then
    echo "error: there is no python on the PATH; activate the project's environment first" >&2
    exit 2
fi

if [ $# -lt 1 ] || [[ $1 == -* ]]; then
    echo "error: give a host list first: launch/ssh.sh hosts.txt --config configs/..." >&2
    exit 2
fi
listed=$(sed 's/\r$//; s/#.*//; /^[[:space:]]*$/d' "$1") || exit 2
hosts=() slots=""
while read -r name count; do
    slots=${slots:-$count}
    if [[ ! $count =~ ^slots=[1-9][0-9]*$ || $count != "$slots" ]]; then
        echo "error: $1 has the line '$name $count'; write one node per line, such as" \
            "gpu-a slots=8, with the same number of processes for all" >&2
        exit 2
    fi
    if [[ " ${hosts[*]-} " == *" $name "* ]]; then
        echo "error: $1 has $name twice; write each node once" >&2
        exit 2
    fi
    hosts+=("$name")
done <<<"$listed"
slots=${slots#slots=}
shift
read -ra ssh <<<"${SSH:-ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15}"

# Quote words for the login shell of another host, which may be any shell.
quoted() {
    local word
    for word in "$@"; do printf " '%s'" "${word//\'/\'\\\'\'}"; done
}

# The nodes read from a pipe to which nothing is written. When this script closes the pipe or ends,
# even by SIGKILL, they read end of file, and a process beside each launcher tells it to stop.
# shellcheck disable=SC2016 # the text in single quotes is expanded by the other host's bash
node='source launch/network.sh; ({ cat; kill -TERM $$; } <&0 >/dev/null 2>&1 &); exec "$@" </dev/null'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkfifo "$folder/pipe"
exec {pipe}<>"$folder/pipe"
close_pipe() {
    : >"$folder/stop"
    [ -z "$pipe" ] || exec {pipe}>&-
    pipe=""
}
trap 'echo "stopping all nodes" >&2; close_pipe' INT TERM HUP

for rank in "${!hosts[@]}"; do
    command="cd$(quoted "$PWD") && exec bash -c$(quoted "$node" node "$python" -m my_project.launch \
        --config_file "accelerate_configs/${WHERE:-multi_node}.yaml" \
        --num_machines "${#hosts[@]}" --num_processes "$((slots * ${#hosts[@]}))" \
        --machine_rank "$rank" --main_process_ip "${ADDRESS:-${hosts[0]}}" \
        --main_process_port "${PORT:-29500}" ${MIN_MACHINES:+--min_machines "$MIN_MACHINES"} \
        -m my_project.train "$@")"
    (
        # open the pipe for reading while it has a writer, then close the inherited writer
        exec {stop}<"$folder/pipe" {pipe}>&-
        comes_back=""
        while :; do
            code=0
            "${ssh[@]}" "${hosts[rank]}" "$command" <&"$stop" 2>&1 |
                sed -u "s|^|${hosts[rank]}: |" || code=$?
            # ssh lost the node, or its launcher was killed or cut off: the node may join again
            [ -n "${MIN_MACHINES:-}" ] && [ "$rank" -gt 0 ] && [[ " 0 2 75 " != *" $code "* ]] || break
            sleep 10
            comes_back=1
            [ ! -e "$folder/stop" ] && [ ! -e "$folder/code.0" ] || break
        done
        # the run does not depend on a node that is started again: node 0 reports how it ended
        [ -z "$comes_back" ] || code=0
        echo "$code" >"$folder/.code.$rank"
        mv "$folder/.code.$rank" "$folder/code.$rank"
    ) &
done

# ---- wait for all nodes --------------------------------------------------------------------------
outcome=0 wait_code=0
while :; do
    ended=0
    for file in "$folder"/code.*; do
        [ -e "$file" ] || continue
        ended=$((ended + 1))
        code=$(<"$file")
        if [ "$code" -ne 0 ] && [ "$outcome" -eq 0 ]; then outcome=$code; fi
        if [ "$code" -ne 0 ] && [ "$code" -ne 75 ]; then
            if [ "$outcome" -eq 75 ] || [ "$code" -eq 2 ]; then outcome=$code; fi
            close_pipe
        fi
    done
    [ "$ended" -lt "${#hosts[@]}" ] && [ "$wait_code" -ne 127 ] || break
    wait_code=0
    wait -n || wait_code=$? # until a node has ended or a signal arrived; 127: all have ended
done
if [ "$ended" -lt "${#hosts[@]}" ] && [ "$outcome" -eq 0 ]; then
    echo "error: the exit code of a node is not known, since $folder cannot be written" >&2
    outcome=1
fi
# with MIN_MACHINES, a node that was told to stop may have left a run that the others finished
if [ "$outcome" -eq 75 ]; then outcome=$(<"$folder/code.0"); fi
exit "$outcome"
