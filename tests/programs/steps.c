/* Prints thirty lines, one every 0.2 s, and never flushes: what a C or C++ trainer does to a log file. */
#include <stdio.h>
#include <unistd.h>

int main(void) {
    for (int step = 0; step < 30; step++) {
        printf("step %d\n", step);
        usleep(200000);
    }
    return 0;
}
