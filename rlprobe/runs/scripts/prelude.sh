# Sourced before a traced script (BASH_ENV). Every simple command passes __rlp_at first: what bash
# does itself (assignments, tests, functions, loops) is done, a few harmless programs are run, every
# other command is noted and left out. Existing files are not overwritten by redirections.
set -o functrace -o noclobber
PATH=$RLPROBE_TRACE_PATH

__rlp_at() {
  # Here and not above: a shell that finds it set when it starts looks for a debugger, and unsets it
  # where there is none. Without it commands would be run.
  shopt -s extdebug || exit 125
  local __rlp_text=$BASH_COMMAND __rlp_a __rlp_w __rlp_f __rlp_r __rlp_first
  if [[ $__rlp_text =~ ^[A-Za-z_][A-Za-z0-9_]*\+?=[^[:space:]]*$ ]]; then return 0; fi
  eval "$("$RLPROBE_TRACE_PYTHON" -I -S "$RLPROBE_TRACE_WORDS" "$__rlp_text")"
  if [[ -z $__rlp_w ]]; then return 0; fi
  # a loop is left here and nowhere else: the command is run all the same, and must do nothing
  if [[ -n $__rlp_leave && $__rlp_r == 0 ]]; then
    case $__rlp_f in "[" | test | : | true | false | echo | printf | sleep) return 3 ;; esac
  fi
  # a test, which in an array's brackets would be read as a subscript
  if [[ $__rlp_f == "[" ]]; then return "$__rlp_r"; fi
  eval "__rlp_first=( $__rlp_f )" 2>/dev/null || return 1
  case $(type -t -- "${__rlp_first[0]}") in
  function | keyword)
    if [[ $__rlp_r == 0 ]]; then return 0; fi
    # without its redirection; what it sets is lost
    (
      trap "$__rlp_trap" DEBUG
      eval "$__rlp_a $__rlp_w"
    )
    return 1
    ;;
  builtin)
    case ${__rlp_first[0]} in
    exec)
      # the rest of a script after a real exec is never reached
      if [[ $__rlp_w == "$__rlp_f" ]]; then return 1; fi
      eval "$__rlp_a \"\$RLPROBE_TRACE_PYTHON\" -I -S \"\$RLPROBE_TRACE_NOTE\" ${__rlp_w#"$__rlp_f"}"
      exit 0
      ;;
    set)
      # -e, -u and -x are about running it; arguments are its own
      if [[ $__rlp_w == "set -- "* ]]; then return 0; fi
      return 1
      ;;
    kill | wait | ulimit | umask | fg | bg | suspend | logout | enable | trap)
      return 1
      ;;
    esac
    return "$__rlp_r"
    ;;
  esac
  if [[ $__rlp_r == 0 && " $RLPROBE_TRACE_HARMLESS " == *" ${__rlp_first[0]##*/} "* ]]; then return 0; fi
  eval "$__rlp_a \"\$RLPROBE_TRACE_PYTHON\" -I -S \"\$RLPROBE_TRACE_NOTE\" $__rlp_w" 2>/dev/null
  __rlp_count "${BASH_LINENO[0]} $__rlp_text"
  return 1
}

# A loop that waits for what is not run (a node that joins Ray, a port that opens) is left after some
# rounds: first the innermost, and where that one is in a loop which waits, all of them.
declare -A __rlp_seen
__rlp_leave=
__rlp_count() {
  local __rlp_n=$((${__rlp_seen[$1]:-0} + 1))
  __rlp_seen[$1]=$__rlp_n
  if ((__rlp_n > 8)); then __rlp_leave=1; fi
  if ((__rlp_n > 12)); then __rlp_leave=99; fi
}

# "break" means the script's loop here, and would not in a function.
__rlp_trap='__rlp_at "$@" || case $? in 3) __rlp_n=$__rlp_leave __rlp_leave=; break $__rlp_n ;; *) false ;; esac'
trap "$__rlp_trap" DEBUG
