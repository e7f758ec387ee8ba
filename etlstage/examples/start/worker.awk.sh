#!/bin/sh
#
# Clean names: drop the blanks around them, refuse a line without a name.
#
# A reply is any number of lines and a NUL; a refusal is its reason and a NAK.

export LC_ALL=C
case $(awk -W version 2>&1 </dev/null) in
mawk*) set -- -W interactive ;;
esac
exec awk "$@" '
{
    gsub(/^[ \t]+|[ \t]+$/, "")
    if ($0 != "") printf "%s\n%c", $0, 0
    else printf "no name%c", 21
    fflush()
}'
