// What all programs include first.
#pragma once
#include "cuda.h"
#include "worker/worker.cuh"
