// One unit for the compiler: nearly all of the time of a build goes into torch's headers.
#include "communicator.cpp"
#include "device.cpp"
#include "group.cpp"
#include "module.cpp"
#include "ops.cpp"
#include "streams.cpp"
