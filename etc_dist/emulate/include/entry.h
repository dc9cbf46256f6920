// The program's entry point for run.cpp, which does not know the type of its arguments. Included
// after the program.
#pragma once

BEGIN_UNTRACKED_CALLS

extern "C" void run_program(const void* arguments) {
  etc_dist_program(*static_cast<const etc::Args*>(arguments));
}

END_UNTRACKED_CALLS
