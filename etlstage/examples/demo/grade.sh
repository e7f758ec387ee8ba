#!/bin/sh
#
# Grade one record: JSON in, the same JSON with one more field out.
#
#   3  substantial damage, or from 100,000 dollars
#   2  medium damage, or from 10,000 dollars
#   1  minor damage, or any cost
#   0  neither damage nor cost
#
# awk does not know JSON, and this does not pretend it does: it searches for
# "name": in a flat object without blanks, as clean.py writes it. That cannot hit a
# text, since within a text each quote has a backslash before it.
#
# How the reading works, and why so: workers/shell/transform.sh of `etlstage init`.

LC_ALL=C
export LC_ALL

exec awk '
function grade(record,    damage, cost, n) {
    damage = field(record, "damage")
    cost = field(record, "cost_usd") + 0
    if (damage == "\"substantial\"" || cost >= 100000) n = 3
    else if (damage == "\"medium\"" || cost >= 10000) n = 2
    else n = (damage == "\"minor\"" || cost > 0)
    sub(/}$/, ",\"grade\":" n "}", record)
    printf "%s\n", record
}

# Return what stands after "name": up to the next comma or the end of the object.
function field(record, name) {
    if (!match(record, "\"" name "\":[^,}]*")) {
        print "grade.sh: a record has no field " name > "/dev/stderr"
        exit 1
    }
    return substr(record, RSTART + length(name) + 3, RLENGTH - length(name) - 3)
}

function read_lines(    text, n) {
    fflush()
    while ((chunk | getline text) > 0) line[++n] = text
    close(chunk)
    if (!n) exit 1
    if (n == 1 && line[1] == ".") return 0
    line[1] = rest line[1]
    rest = substr(line[n], 1, length(line[n]) - 1)
    count = n - 1
    return 1
}

BEGIN {
    chunk = "dd bs=65536 count=1 2>/dev/null && echo ."
    while (read_lines())
        for (k = 1; k <= count; k++) {
            grade(line[k])
            printf "%c", 0
        }
}'
