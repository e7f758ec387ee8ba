/*
 * Clean names: drop the blanks around them, refuse a line without a name.
 *
 * A reply is any number of lines and a NUL; a refusal is its reason and a NAK.
 */

#include <stdio.h>
#include <stdlib.h>

int main(void) {
    char *line = NULL;
    size_t room = 0;
    ssize_t size;
    while ((size = getline(&line, &room, stdin)) > 0 && line[size - 1] == '\n') {
        char *start = line, *end = line + size - 1;
        while (start < end && (*start == ' ' || *start == '\t')) start++;
        while (start < end && (end[-1] == ' ' || end[-1] == '\t')) end--;
        if (start < end) {
            fwrite(start, 1, end - start, stdout);
            fwrite("\n\0", 1, 2, stdout);
        } else {
            fputs("no name\x15", stdout);
        }
        fflush(stdout);
    }
    return 0;
}
