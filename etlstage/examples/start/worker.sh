#!/bin/sh
#
# Clean names: drop the blanks around them, refuse a line without a name.
#
# A reply is any number of lines and a NUL; a refusal is its reason and a NAK.

while read -r name; do
    if [ -n "$name" ]; then
        printf '%s\n\000' "$name"
    else
        printf 'no name\025'
    fi
done
