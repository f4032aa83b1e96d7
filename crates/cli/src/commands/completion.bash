# Completion of tinkex for bash: source <(tinkex completions bash)

_tinkex_complete() {
    # Bash splits words at the characters of COMP_WORDBREAKS, among them the colon of tinker:// paths
    # and run ids. Join the parts that follow each other in the line without a space.
    local words=() cword=0 rest=${COMP_LINE:0:COMP_POINT} index part
    for ((index = 0; index <= COMP_CWORD; index++)); do
        part=${COMP_WORDS[index]}
        [[ $index -gt 0 && ( -z $rest || $rest == [[:space:]]* ) ]] && cword=$((cword + 1))
        rest=${rest#"${rest%%[![:space:]]*}"}
        # The cursor may be inside the last word.
        [[ $index -eq $COMP_CWORD ]] && part=$rest
        words[cword]+=$part
        rest=${rest#"$part"}
    done
    local current=${words[cword]} IFS=$'\013'
    COMPREPLY=($(
        _CLAP_IFS="$IFS" \
        _CLAP_COMPLETE_INDEX="$cword" \
        _CLAP_COMPLETE_COMP_TYPE="$COMP_TYPE" \
        _CLAP_COMPLETE_SPACE=false \
        COMPLETE=bash \
        tinkex -- "${words[@]}"
    )) || { COMPREPLY=(); return; }
    # Bash replaces only the part behind the last character at which it splits words.
    local breaks=${COMP_WORDBREAKS//[!:=]/}
    if [[ -n $breaks && $current == *[$breaks]* ]]; then
        local before=${current%"${current##*[$breaks]}"}
        COMPREPLY=("${COMPREPLY[@]#"$before"}")
    fi
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=/:] ]]; then
        compopt -o nospace 2> /dev/null
    fi
}
if [[ ${BASH_VERSINFO[0]} -gt 4 || ( ${BASH_VERSINFO[0]} -eq 4 && ${BASH_VERSINFO[1]} -ge 4 ) ]]; then
    complete -o bashdefault -o nosort -F _tinkex_complete tinkex
else
    complete -o bashdefault -F _tinkex_complete tinkex
fi
