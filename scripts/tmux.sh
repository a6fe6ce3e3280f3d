#!/usr/bin/env bash
# A tmux session. Its window RL has three panes: Trainer, Orchestrator, Inference. The last two follow the logs of the run
# in the output directory, and are shells all the same: type a command into any of them. What `rl` says stands in the
# Trainer pane. The window Monitor shows GPUs, processors, memory, disk and the last step.
#
#   bash scripts/tmux.sh [-s SESSION] [-o OUTPUT_DIR] [--no-attach]
set -euo pipefail

session=hone
output=outputs
attach=1
while (($#)); do
  case "$1" in
    -s | --session | --session-name) session=${2:?"$1 wants a name"}; shift 2 ;;
    -o | --output-dir) output=${2:?"$1 wants a directory"}; shift 2 ;;
    --no-attach) attach=0; shift ;;
    -h | --help) sed -n '2,6s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "tmux.sh: unknown option $1 (see --help)" >&2; exit 2 ;;
  esac
done
command -v tmux >/dev/null || { echo "tmux.sh: tmux is not installed" >&2; exit 1; }

if ! tmux has-session -t "=$session" 2>/dev/null; then
  # tail -F waits for files that are not there yet and follows those of the next run.
  follow() { printf 'clear; tail -n 0 -F %s 2>/dev/null &' "$1"; }
  log() { printf '%q ' "$output/logs/$1.log"; }
  here=$(pwd)
  trainer=$(tmux new-session -d -P -F '#{pane_id}' -s "$session" -n RL -c "$here" -x 200 -y 50)
  orchestrator=$(tmux split-window -v -P -F '#{pane_id}' -t "$trainer" -c "$here")
  inference=$(tmux split-window -v -P -F '#{pane_id}' -t "$orchestrator" -c "$here")
  tmux select-layout -t "$session:RL" even-vertical >/dev/null
  tmux set-option -t "$session" pane-border-status top >/dev/null
  tmux set-option -t "$session" pane-border-format ' #{pane_title} ' >/dev/null
  tmux select-pane -t "$trainer" -T Trainer
  tmux select-pane -t "$orchestrator" -T Orchestrator
  tmux select-pane -t "$inference" -T Inference
  tmux send-keys -t "$orchestrator" "$(follow "$(log orchestrator)")" C-m
  tmux send-keys -t "$inference" "$(follow "$(log inference)$(log inference_0)$(log inference_1)")" C-m
  tmux new-window -d -t "$session:" -n Monitor -c "$here" \
    "$(printf 'bash %q %q' "$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/monitor.sh" "$output")"
  tmux select-pane -t "$trainer"
fi

if ((attach)); then
  if [[ -n ${TMUX:-} ]]; then exec tmux switch-client -t "=$session"; else exec tmux attach-session -t "=$session"; fi
fi
echo "session $session: attach with \`tmux attach -t $session\`"
