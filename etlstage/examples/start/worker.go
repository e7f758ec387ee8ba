// Clean names: drop the blanks around them, refuse a line without a name.
//
// A reply is any number of lines and a NUL; a refusal is its reason and a NAK.
package main

import (
	"bufio"
	"bytes"
	"os"
)

func main() {
	in := bufio.NewReader(os.Stdin)
	out := bufio.NewWriter(os.Stdout)
	defer out.Flush()
	for {
		line, err := in.ReadBytes('\n')
		if err != nil {
			return // the end; what stands before it is not complete
		}
		if name := bytes.TrimSpace(line); len(name) > 0 {
			out.Write(name)
			out.WriteString("\n\x00")
		} else {
			out.WriteString("no name\x15")
		}
		if in.Buffered() == 0 { // about to wait
			out.Flush()
		}
	}
}
